"""One of several processes that trains and prints its losses: `python -m tests.run.parity_process`.

WORDS are KIND FOLDER [STEPS]; the checkpoint in FOLDER, of any number of processes, is continued.
"""

import json
import os
import sys
from typing import Any

import jax

import jaxspeed
from jaxspeed.engine.jax_setup import simulate

STEPS = 4
KINDS: dict[str, dict[str, Any]] = {
    "data": {"zero_optimization": {"stage": 1}},
    "zero 3": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
    "tensor": {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}},
    "pipeline": {"mesh": {"pipe": 2}, "zero_optimization": {"stage": 1}},
    "ring": {"parallel": {"data_reduction": "ring"}, "zero_optimization": {"stage": 1}},
}


def config_of(kind: str) -> dict[str, Any]:
    return {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "run": {"seed": 3},
        **KINDS[kind],
    }


def main(kind: str, folder: str, steps: int) -> None:
    jaxspeed.start_processes(120.0)
    simulate(int(os.environ.get("TEST_DEVICES", "8")))
    from tests.train.cases import CASES

    case = CASES["gpt2"]
    engine = jaxspeed.initialize(case.model, case.loss, config_of(kind), case.optimizer("adam"))
    tag, _ = engine.load_checkpoint(folder)
    begun = int(engine.state.step)
    batches = case.batches(2, steps=begun + steps)[begun:]
    losses = []
    for batch in batches:
        at = engine.program.batch_shardings(batch)
        placed = {
            name: jax.make_array_from_callback(x.shape, at[name], lambda rows, x=x: x[rows])
            for name, x in batch.items()
        }
        losses.append(float(engine.train_batch(placed)["loss"]))
    engine.save_checkpoint(folder)
    engine.close()
    print(json.dumps({"from": tag, "step": begun, "losses": losses}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
