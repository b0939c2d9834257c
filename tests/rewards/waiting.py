"""A process that waits for a reward: `python -m tests.rewards.waiting FUNCTION FILE`."""

import signal
import sys

from jaxspeed.rewards.reward_workers import RewardCall, RewardWorkers

if __name__ == "__main__":
    name, file = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the background has it ignored
    workers = RewardWorkers([f"tests.rewards.functions:{name}"], 2, 1000)
    try:
        columns, prompts = {"child": [file]}, {"prompts": ["x"]}
        workers.run([RewardCall(0, columns, prompts, {})], False, lambda: None)
    except KeyboardInterrupt:
        workers.close()
        sys.exit(130)
