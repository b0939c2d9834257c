"""Reward functions of tests, imported by workers: none imports JAX."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np


def length(completions, **kwargs):
    return [len(completion) for completion in completions]


async def answered(completions, completion_ids, answer, trainer_state, log_extra, log_metric):
    await asyncio.sleep(0.001)
    log_extra("right", [np.bool_(c == a) for c, a in zip(completions, answer)])
    log_metric("step", trainer_state.global_step + len(completions))
    return [None if a is None else Fraction(len(c), 2) for c, a in zip(completion_ids, answer)]


class Scorer:
    def __call__(self, prompts, completions, **kwargs):
        return np.array([len(p) + kwargs["bonus"][i] for i, p in enumerate(prompts)])


scorer = Scorer()
number = 3


def keywords(**kwargs):
    assert kwargs["completions"], "empty"
    return [len(kwargs)] * len(kwargs["prompts"])


def environment(prompts):
    print("printed by a reward")
    is_light = not {"jax", "jaxspeed", "jaxspeed.errors"} & sys.modules.keys()
    return [os.getpid(), os.environ["JAX_PLATFORMS"] == "cpu" and is_light, sys.stdin.read() == ""]


def naps(prompts):
    time.sleep(0.1)
    return [os.getpid()] * len(prompts)


def terminated(prompts):
    os.kill(os.getpid(), signal.SIGTERM)
    started = subprocess.Popen(["sleep", "1000"])
    started.terminate()
    assert started.wait(5) == -signal.SIGTERM
    return [1.0] * len(prompts)


# -- what fails ------------------------------------------------------------------------------------


def raises(prompts):
    raise ValueError("a first line\nand a second")


def too_few(prompts):
    return [1.0] * (len(prompts) - 1)


def not_finite(prompts):
    return [1.0, float("nan"), 2.0]


def texts(prompts):
    return ["1.0"] * len(prompts)


def no_list(prompts):
    return 1.0


def needs_more(prompts, solution, hint):
    return [1.0] * len(prompts)


def short_column(prompts, log_extra):
    log_extra("x", [1])
    return [1.0] * len(prompts)


def leaves(prompts):
    sys.exit("done")


def dies(prompts):
    os._exit(3)


def is_killed(prompts):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(prompts, child):
    """For ever where a record has a file for the numbers of its processes."""
    if child[0]:
        started = subprocess.Popen(["sleep", "1000"])
        with open(child[0], "w") as file:
            file.write(f"{os.getpid()} {started.pid}\n")
        time.sleep(1000)
    return [1.0] * len(prompts)


def matches(prompts, child):
    """As `sleeps`, without a moment in which another thread could run."""
    started = subprocess.Popen(["sleep", "1000"])
    with open(child[0], "w") as file:
        file.write(f"{os.getpid()} {started.pid}\n")
    re.match(r"(a+)+$", "a" * 60 + "b")
