"""One of several processes with a loop of their own: `python -m tests.run.own_loop FOLDER CONFIG`.

The process TEST_RANK blocks for ever in TEST_PLACE, at the fourth step. Limits are a few seconds;
those of what takes long on a slow machine are not.
"""

import json
import os
import sys
import threading
from typing import Any

from jaxspeed.engine.saver import Saver
from tests.engine import tiny

LIMITS = {"silence": 12.0, "start": 240.0, "compile": 240.0}
LIMITS |= {"step": 6.0, "evaluate": 6.0, "save": 6.0, "user_code": 4.0}


def block(*_: Any, **__: Any) -> None:
    print("blocks", flush=True)
    threading.Event().wait()


def main(folder: str, config: dict[str, Any], place: str) -> None:
    engine = tiny.engine(**{"run": {"watchdog": LIMITS}, **config})
    batch = tiny.batch(engine.program.batch.train)
    for step in range(6):
        if place == "user code" and step == 3:
            block()
        if place == "train_batch" and step == 3:
            engine._place = block
        loss = float(engine.train_batch(batch)["loss"])
        if place == "eval_batch" and step == 3:
            engine._place = block
        engine.eval_batch(batch)
        if place == "save_checkpoint" and step == 3:
            Saver.save = block  # type: ignore[method-assign]
        engine.save_checkpoint(folder)
    engine.close()
    print("done", loss, flush=True)


if __name__ == "__main__":
    blocks = os.environ["JAX_PROCESS_ID"] == os.environ.get("TEST_RANK")
    main(sys.argv[1], json.loads(sys.argv[2]), os.environ["TEST_PLACE"] if blocks else "")
