"""Jobs for the processes of a search."""

import os
import signal
import time


class Doubling:
    """Answers with twice the question, and the process that did; some questions go wrong."""

    def __call__(self):
        print("what a job prints is no answer")

        def answer(question):
            if question == "die":
                os._exit(3)
            if question == "be killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if question == "wait":
                time.sleep(600)
            if question == "no":
                raise ValueError("no")
            return 2 * question, os.getpid()

        return answer
