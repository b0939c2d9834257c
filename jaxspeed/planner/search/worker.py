"""A process that answers questions until the one that asks is gone."""

import os
import pickle
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Reads a job from stdin, then a question after the other, and writes the answers to stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints is no answer
    questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    answer = pickle.loads(job)()
    while True:
        question = questions.get()
        try:
            made: tuple[Any, Exception | None] = answer(question), None
        except Exception as error:  # which is raised where it was asked
            made = None, error
        pickle.dump(made, answers)
        answers.flush()


def _read(questions: "queue.SimpleQueue[Any]") -> None:
    """Questions, also while one is worked on: where they end, so does this process."""
    try:
        while True:
            questions.put(pickle.load(sys.stdin.buffer))
    except EOFError:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
