"""Eight simulated devices and a compilation cache, asked for before anything imports JAX."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import compilation_cache

DEVICES = "--xla_force_host_platform_device_count"

# Tests start many processes that import the package: its source is compiled to bytecode once, also
# where the environment asks for none.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The terminal's width, which readline puts there: what children print would be wrapped at it.
os.environ.pop("COLUMNS", None)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()
# Without LLVM's optimizer, which is half of a compile and changes no program's meaning: how XLA
# partitions it is as ever. The tests of how programs are read switch it on again.
if os.environ["JAX_PLATFORMS"] == "cpu":  # tests/gpu are of programs as they run
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Most of the suite's time is compiling. Child processes of the tests inherit the cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache.folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

settings.register_profile(
    "jaxspeed",
    deadline=None,  # an example that compiles is slow the first time
    derandomize="CI" in os.environ,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("jaxspeed")


def pytest_collection_finish() -> None:
    """Collect garbage less often: traces hold millions of objects, which all would be visited."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


# -- what tests compare with, in a process of its own ----------------------------------------------


@pytest.fixture(scope="session")
def references() -> Iterator[Any]:
    """`tests.support.references.References`: one process for each worker of xdist."""
    from tests.support.references import References

    process = References()
    yield process
    process.close()
    assert "torch" not in sys.modules


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """`tests.support.s3.Server`: one for each worker of xdist."""
    from tests.support.s3 import Server

    with Server() as server:
        yield server


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That server with an empty bucket, `s3://bucket`, as this process's and its children's."""
    s3_server.clear()
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


# -- a worker that dies ----------------------------------------------------------------------------

# Seen a few times in some ten thousand tests: a segmentation fault in libgcc's unwinder. It reads
# its table of the frames of compiled programs, one of which is no longer mapped (jaxlib 0.12.0.1 on
# CPUs, libgcc 12). xdist runs the tests of a dead worker again in a new one. So the first death is
# named, and is no failure; a test in which the new worker dies too fails.
DIED = "worker died"


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    deaths = sched.config.stash.setdefault(_DEATHS, [])
    deaths.append(crashitem)
    if len(deaths) == 1:
        report.outcome = DIED


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    return (DIED, "D", DIED.upper()) if report.outcome == DIED else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get(DIED, ()):
        terminalreporter.line(f"WORKER DIED in {report.nodeid}, which was run again")


_DEATHS = pytest.StashKey[list[str]]()

# -- which tests are run ---------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="SEED", help="see tests/support/sample.py")
    parser.addoption("--cpu-seconds", metavar="FILE", help="write the CPU seconds of each test")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `default_cases` does not name as `full`; before pytest selects by marks."""
    from tests.support import covering, sample

    covering.choose_default(items, config.stash)
    if (seed := config.getoption("sample")) is not None:
        kept = set(sample.keep(items, seed))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


# -- tests marked `fast` compile nothing -----------------------------------------------------------

_COMPILED: list[str] = []  # what JAX compiled, or read from its cache, in the test that runs


def _on_event(event: str, _: float, **about: Any) -> None:
    if event.endswith("backend_compile_duration"):
        _COMPILED.append(str(about.get("fun_name", "a program")))


def pytest_configure(config: pytest.Config) -> None:
    from jax import monitoring

    from tests.support import covering
    from tests.support.cpu_seconds import CpuSeconds

    covering.is_full = "full" in config.option.markexpr.replace("not full", "")
    config.pluginmanager.register(CpuSeconds(config))
    monitoring.register_event_duration_secs_listener(_on_event)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _COMPILED.clear()
    _recorded_as(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
    if _COMPILED and item.get_closest_marker("fast"):
        pytest.fail(f"marked `fast`, and compiles {', '.join(_COMPILED)}")
    return result


# -- which test executes which file: `make test-map` ----------------------------------------------


def _recorded_as(name: str) -> None:
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        if current := coverage.Coverage.current():
            current.switch_context(name)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Any:
    """What a shared fixture executes counts for all tests that may share it."""
    shared = request.scope != "function"
    if shared:
        _recorded_as(request.node.nodeid)
    result = yield
    if shared:
        _recorded_as(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])
    return result
