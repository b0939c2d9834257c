"""Runs in a process of their own: their losses to the last bit, and what XLA compiled for them.

python -m tests.engine.starting CONFIG STEPS EXECUTABLE...

One run for each executable; an empty name is for a run that compiles its step.
"""

import json
import logging
import sys
from typing import Any

import jax
import numpy as np

import jaxspeed


def main(config: str, steps: str, *executables: str) -> None:
    compiled: list[str] = []
    warned: list[str] = []

    def heard(event: str, _: float, **told: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(told.get("fun_name")))

    class Warned(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    logging.getLogger("jaxspeed").addHandler(Warned(logging.WARNING))
    jaxspeed.simulate(8)
    jax.monitoring.register_event_duration_secs_listener(heard)
    for executable in executables:
        compiled.clear()
        warned.clear()
        engine = jaxspeed.initialize(config=json.loads(config), executable=executable or None)
        rng, losses = np.random.default_rng(0), []
        for _ in range(int(steps)):
            samples = engine.program.batch.train
            tokens = rng.integers(0, 64, (samples, 33)).astype(np.int32)
            losses.append(float(engine.train_batch({"tokens": tokens})["loss"]).hex())
        print(json.dumps({"losses": losses, "compiled": compiled, "warned": warned}))


if __name__ == "__main__":
    main(*sys.argv[1:])
