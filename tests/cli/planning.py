"""`jaxspeed plan` as a test calls it: in this process, with what it says and complains of."""

import contextlib
import functools
import io
from types import SimpleNamespace

from jaxspeed.cli.main import main


def plan(*words):
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(["plan", *map(str, words)])
    return SimpleNamespace(returncode=code, stdout=said.getvalue(), stderr=complained.getvalue())


plan_once = functools.cache(plan)  # for calls that write no file
