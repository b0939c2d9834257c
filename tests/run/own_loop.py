"""One of several processes with a loop of their own: `python -m tests.run.own_loop FOLDER`.

The process TEST_RANK blocks for ever in TEST_PLACE. Limits are a few seconds; those of the start
and of compilation are not.
"""

import json
import os
import sys
import threading
from typing import Any

import jax

import jaxspeed
from tests.engine import tiny

LIMITS = {"silence": 12.0, "start": 240.0, "compile": 240.0, "restore": 240.0}
LIMITS |= {"step": 6.0, "evaluate": 6.0, "save": 6.0, "user_code": 4.0}


def block(*_: Any, **__: Any) -> None:
    print("blocks", flush=True)
    threading.Event().wait()


def main(folder: str, place: str, config: dict[str, Any]) -> None:
    count = int(os.environ["JAX_NUM_PROCESSES"])
    engine = tiny.engine(**{"run": {"watchdog": LIMITS}, "gradient_accumulation_steps": 2} | config)
    batch = tiny.batch(engine.program.batch.train)
    if place == "train_batch":
        engine.add_hook(lambda step, metrics: step < 3 or block())
    if place in ("eval_batch", "save_checkpoint"):
        part = {"eval_batch": engine.program, "save_checkpoint": engine._saver}[place]
        name = {"eval_batch": "read_batch", "save_checkpoint": "save"}[place]
    for step in range(8):
        if place == "user code" and step == 3:
            block()
        loss = float(engine.train_batch(batch)["loss"])
        engine.eval_batch(batch)
        engine.save_checkpoint(folder)
    engine.close()
    print("done", json.dumps(loss), flush=True)


if __name__ == "__main__":
    own = os.environ["JAX_PROCESS_ID"] == os.environ.get("TEST_RANK")
    main(sys.argv[1], os.environ["TEST_PLACE"] if own else "", json.loads(sys.argv[2]))
