"""Worker process of a search: answers requests from stdin until its parent ends."""

import os
import pickle
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Read a job and then requests from stdin; write their responses to stdout."""
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with responses
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    answer = pickle.loads(job)()
    while True:
        request = requests.get()
        try:
            response: tuple[Any, Exception | None] = answer(request), None
        except Exception as error:  # raised in the parent
            response = None, error
        pickle.dump(response, responses)
        responses.flush()


def _read(requests: "queue.SimpleQueue[Any]") -> None:
    """Read requests, even while one is being answered, and end this process with its parent."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    except EOFError:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
