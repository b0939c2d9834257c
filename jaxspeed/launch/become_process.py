"""Become a process of a run: `python -I -S become_process.py PARENT CORES COMMAND...`.

Between fork and exec Python runs no code in a child safely once the launcher has threads, so this
small program sets what a process inherits, and then executes the command in its place.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, cores, *command = sys.argv[1:]
    # Whatever ends the launcher, also SIGKILL, ends this process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before that
        sys.exit(1)
    if cores != "-":
        os.sched_setaffinity(0, set(map(int, cores.split(","))))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
