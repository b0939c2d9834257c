"""Small spaces of choices, and made-up estimates of them, for tests of the search."""

import math
import random
from concurrent.futures import Future
from dataclasses import replace

from jaxspeed.config import Config
from jaxspeed.config.tree import read
from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import Choice, choice_of
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

LIMIT = 10**9


def space_of(given, devices, layers=8, tensor=(1, 2, 4, 8), node=8, **more):
    """(space, samples) of a config as written."""
    config = Config.load(given)
    base = choice_of(config, devices)
    samples = config.batch(base.ranks, base.pipe).train
    return Space(base, devices, samples, layers, tensor, node, **more)


def submitted(estimate):
    """As a pool's `submit`, done at once."""

    def submit(choice):
        future = Future()
        future.set_result(estimate(choice))
        return future

    return submit


def made_up(space, seed, noise=0.0):
    """(estimate, cost): times and bytes that every field changes; the cost is off by noise.

    Not what any device does, but of its kind: recompute frees and costs, offload
    too, a larger micro-batch is faster and larger, collectives grow with their axes.
    """

    def weight(*key):
        return 1 + random.Random(repr((seed, *key))).random()

    def bytes_of(at: Choice) -> float:
        kept = {'"none"': 8, '"dots"': 4, '"attention"': 2}.get(at.recompute, 1)
        kept *= weight("kept", at.recompute) / (at.pipe * at.tensor)
        kept *= 1 - 0.7 * at.offload_activations
        state = 4 / (at.pipe * at.tensor) / (at.shards if at.stage else 1) ** (at.stage / 3)
        state *= 0.4 if at.offload_optimizer else 1
        state *= 0.6 if at.offload_parameters else 1
        return (state + 0.1 * kept * at.micro) * LIMIT / weight("size") / 2

    def seconds_of(at: Choice) -> float:
        again = {'"none"': 0, '"dots"': 0.1, '"attention"': 0.25}.get(at.recompute, 0.33)
        time = (1 + again) * (1 + weight("micro") / (1 + at.micro))
        time *= 1 + (at.pipe - 1) / at.accumulation(space.samples) / (
            at.chunks if at.schedule == "interleaved" else 1
        )
        time += 0.1 * weight("tensor") * math.log2(at.tensor) * (1 if at.sequence else 1.3)
        time += 0.05 * weight("stage", at.stage) * at.stage * math.log2(at.shards + 1)
        time += 0.02 * weight("copies") * math.log2(at.copies)
        time += 0.5 * (at.offload_activations + at.offload_optimizer + at.offload_parameters)
        return time + (0.1 if at.stage_saves == "stage" and at.pipe > 1 else 0)

    def off(at: Choice, what: str) -> float:
        return 1 + noise * (2 * random.Random(repr((seed, what, at))).random() - 1)

    def estimate(at: Choice) -> Estimate:
        device, seconds = bytes_of(at), seconds_of(at)
        fits = "fits" if device * 1.2 <= LIMIT else "tight" if device <= LIMIT else "does not fit"
        rate = space.samples / seconds
        return Estimate(
            int(device), 0, LIMIT, LIMIT, fits, seconds, rate, 0.4, {"compute": seconds}
        )

    def cost(at: Choice) -> AnalyticCost:
        return AnalyticCost(
            bytes_of(at) * off(at, "bytes"), 0.0, seconds_of(at) * off(at, "seconds")
        )

    return estimate, cost


def batch_of(given, words, devices):
    """The batch that a config gives on so many devices, and itself, for claims about it."""
    config = Config.load(given)
    choice = choice_of(config, devices)
    return config.batch(choice.ranks, choice.pipe), choice


__all__ = ["LIMIT", "batch_of", "made_up", "read", "replace", "space_of", "submitted"]
