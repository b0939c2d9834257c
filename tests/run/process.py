"""One process of several that run `jaxspeed WORDS`, with a fault: `python -m tests.run.process`.

TEST_FAULT is `SECTION:KIND[:STEP[:DELAY]]`; the process does KIND once the section begins (at this
step), or so many seconds later, wherever it is then.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from jaxspeed.cli import main
from jaxspeed.data.split import Split
from jaxspeed.run.watchdog import Watchdog


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def block() -> None:
    threading.Event().wait()


def fail() -> None:
    raise ValueError("a fault of the user's")


def slow() -> None:
    time.sleep(float(os.environ["TEST_SLOW"]))


KINDS = {f.__name__: f for f in (kill, stop, block, fail, slow)}


def inject(fault: str) -> None:
    section, kind, *more = fault.split(":")
    at, delay = int([*more, 0][0]), float([*more, 0, 0][1])
    change, tick, start = Watchdog._change, Watchdog.tick, Watchdog.start
    done = []

    def happen(*_: Any) -> None:
        print(f"\nfault: {time.time()}", flush=True)
        KINDS[kind]()

    def act(self: Watchdog) -> None:
        here = self.sections.at
        if here.section == section and here.step >= at and not done:
            done.append(True)
            if not delay:
                time.sleep(1.0)  # two heartbeats: others know process 0's section from its last one
                happen()
            elif kind == "block":  # a handler runs in the main thread
                signal.signal(signal.SIGALRM, happen)
                signal.setitimer(signal.ITIMER_REAL, delay)
            else:
                threading.Timer(delay, happen).start()

    def changed(self: Watchdog, name: str) -> None:
        change(self, name)
        act(self)

    def ticked(self: Watchdog, step: int | None = None) -> None:
        tick(self, step)
        act(self)

    Watchdog._change, Watchdog.tick = changed, ticked  # type: ignore[method-assign]
    if section == "start":

        def started(self: Watchdog) -> Any:
            start(self)
            act(self)
            return self

        Watchdog.start = started  # type: ignore[method-assign]


def record_ids(path: str) -> None:
    """Append the step and the sample ids of each batch that this process reads."""
    batch = Split.batch

    def recorded(self: Split, step: int, size: int, rows: Any = None) -> Any:
        ids = self.sample_ids(step, size, rows).tolist()
        if ids:
            with open(path, "a") as file:
                file.write(json.dumps([step, ids]) + "\n")
        return batch(self, step, size, rows)

    Split.batch = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    if path := os.environ.get("TEST_IDS"):
        record_ids(path + os.environ["JAX_PROCESS_ID"])
    fault = os.environ["TEST_FAULT"]
    if fault:
        inject(fault)
    sys.exit(main(sys.argv[1:]))
