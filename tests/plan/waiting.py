"""A parent that waits for a compile which never ends: `python -m tests.plan.waiting FILE`."""

import functools
import signal
import sys

from jaxspeed.cli.main import INTERRUPTED
from jaxspeed.plan.compiling import compile_for
from jaxspeed.plan.targets import target_of
from tests.plan import jobs

if __name__ == "__main__":
    # Whoever starts the tests in the background has them, and this, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        compile_for(target_of("cpu:2"), functools.partial(jobs.forever, told=sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
