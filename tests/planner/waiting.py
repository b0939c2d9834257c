"""A parent that waits for a compile which never ends: `python -m tests.planner.waiting FILE`."""

import functools
import signal
import sys

from jaxspeed.cli.common import INTERRUPTED
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.in_child import compile_for
from tests.planner import jobs

if __name__ == "__main__":
    # Whoever starts the tests in the background has them, and this, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        compile_for(target_of("cpu:2"), functools.partial(jobs.forever, told=sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
