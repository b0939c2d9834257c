"""The tests that execute a file, as `make test-map` recorded them: one test name a line.

A helper that is cached counts for the test that called it first.
"""

import re
import sys
from pathlib import Path

from coverage import CoverageData


def tests_of(file: Path, recorded: Path) -> list[str]:
    """Names of tests, and of files whose shared fixtures execute it."""
    data = CoverageData(str(recorded))
    data.read()
    found = data.contexts_by_lineno(str(file.resolve())).values()
    # Of a child it is PYTEST_CURRENT_TEST: "file::test (call)".
    return sorted(
        {re.sub(r" \((setup|call|teardown)\)$", "", n) for names in found for n in names if n}
    )


def main(file: str, recorded: str) -> int:
    if not file or not Path(file).is_file():
        print(f"make test-for F=jaxspeed/...py: there is no file {file!r}", file=sys.stderr)
        return 2
    if not Path(recorded).exists():
        print("nothing is recorded yet: `make test-map` runs all tests once", file=sys.stderr)
        return 2
    tests = [name for name in tests_of(Path(file), Path(recorded)) if _exists(name)]
    if not tests:
        print(f"no recorded test executes {file}", file=sys.stderr)
        return 1
    print("\n".join(tests))
    return 0


def _exists(name: str) -> bool:
    return Path(name.partition("::")[0]).exists()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
