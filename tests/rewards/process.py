"""One of two processes that score completions: `python -m tests.rewards.process FOLDER ERRORS`.

FOLDER has a reward model. The groups of process 1 have one that sleeps for ever. It prints what
all processes have to agree on.
"""

import json
import sys
import time
from pathlib import Path

import jax

import jaxspeed
from jaxspeed.config.rollout_options import GrpoOptions
from jaxspeed.errors import JaxspeedError
from jaxspeed.rewards.rollout_function import RolloutFunction, RolloutTrainer
from jaxspeed.rewards.scoring import Rewards, TrainerProgress
from tests.rewards.scored import engine_of, rows_of

LIMIT = 2.0
PROGRESS = TrainerProgress(0, 1, 0.0)


def sample(prompts, trainer):
    if trainer.engine == "fails" and jax.process_index() == 1:
        raise ValueError("no server")
    rank = jax.process_index()
    ids = [[rank + 1]] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[-0.5]] * 2, "rank": rank}


def main() -> None:
    folder, errors = sys.argv[1:]
    file = str(Path(folder) / f"sleeping-{errors}")
    jax.config.update("jax_platforms", "cpu")
    jaxspeed.start_processes(120)
    options = GrpoOptions(
        rewards=["tests.rewards.functions:sleeps", "tests.rewards.functions:length", folder],
        reward_timeout=LIMIT,
        reward_error=errors,
    )
    rows = rows_of(child=[None, None, None, file, None])
    with Rewards(options, tokenizer=None) as rewards:
        rewards.add_models(engine_of().program)
        rewards.score(rows_of(child=[None] * 5), PROGRESS)  # compiles
        begun = time.monotonic()
        try:
            table = rewards.score(rows, PROGRESS)
            outcome = {"values": table.values.tolist(), "failures": table.failures}
        except JaxspeedError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
    print(f"took: {time.monotonic() - begun}")
    print(f"outcome: {json.dumps(outcome)}")
    if errors == "drop":
        function = RolloutFunction("tests.rewards.process:sample", 4, None, None)
        of = {name: RolloutTrainer(name, None, options, PROGRESS) for name in ("works", "fails")}
        print(f"rollout: {function(['a', 'b'], ['1', '2'], of['works'])}")
        try:
            function(["a", "b"], ["1", "2"], of["fails"])
        except JaxspeedError as error:
            print(f"failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
