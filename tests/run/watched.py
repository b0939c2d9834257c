"""One of several processes that only exchange numbers, watched: `python -m tests.run.watched`.

Ten steps, each an all-gather, with a section `save` after each fifth; the faults are those of
`tests.run.process`.
"""

import os
import sys

import jax
import numpy as np

import jaxspeed
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.config.run_sections import WatchdogSection
from jaxspeed.run.same_run import meet
from jaxspeed.run.watchdog import watchdog_of
from tests.run.process import inject

SILENCE, STEP = 6.0, 8.0


def main() -> None:
    fault = os.environ["TEST_FAULT"]
    jax.config.update("jax_platforms", "cpu")
    jaxspeed.start_processes(float(os.environ.get("TEST_START", "120")))
    rank, count = jax.process_index(), jax.process_count()
    from jax.experimental import multihost_utils

    if fault:
        inject(fault)
    limits = dict.fromkeys(("start", "compile", "step", "save"), STEP)
    watchdog = watchdog_of(WatchdogSection(silence=SILENCE, **limits))
    facts = {"config run.seed": os.environ.get(f"TEST_SEED_{rank}", "0")}
    meet(watchdog, facts)
    processes = Processes()
    with watchdog.section("compile"):
        multihost_utils.process_allgather(np.array(0))
    with watchdog.section("step"):
        for step in range(10):
            watchdog.tick(step)
            assert multihost_utils.process_allgather(np.array(step)).sum() == step * count
            if step % 5 == 4:
                with watchdog.section("save"):
                    processes.wait("saving")
    print("done")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        from jaxspeed.run.watchdog import end_all

        end_all(error)
        sys.exit(1)
