"""The protocol of the references' process; torch and the others are imported in no other one."""

import ast
import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.references.exchange import PACKAGES
from tests.support.references import OVERRIDE, References, ReferencesError

TESTS = Path(__file__).parent
OTHERS = set(PACKAGES) - {"safetensors"}
DTYPES = {
    "float64": "torch.float64", "float32": "torch.float32", "float16": "torch.float16",
    "bfloat16": "torch.bfloat16", "float8_e4m3fn": "torch.float8_e4m3fn",
    "float8_e5m2": "torch.float8_e5m2", "int64": "torch.int64", "int32": "torch.int32",
    "int16": "torch.int16", "int8": "torch.int8", "uint8": "torch.uint8",
    "uint16": "torch.uint16", "uint32": "torch.uint32", "bool": "torch.bool",
    "complex64": "torch.complex64",
}  # fmt: skip


@pytest.fixture
def own():
    """A process that may be killed."""
    process = References()
    yield process
    process.close()


def numbers(dtype):
    """0 and 1, which every dtype has, in an array that is not contiguous."""
    return np.array([[1, 0, 1], [1, 1, 0]]).astype(getattr(ml_dtypes, dtype, dtype)).T


def test_arrays_of_each_dtype_are_torchs_there_and_come_back(references):
    arrays = {dtype: numbers(dtype) for dtype in DTYPES}
    described = references.call("protocol.described", tensors=arrays)
    assert described == {dtype: [theirs, [3, 2], 4.0] for dtype, theirs in DTYPES.items()}
    back = references.call("protocol.received", value=arrays)
    for dtype, x in arrays.items():
        assert (back[dtype].dtype, back[dtype].shape) == (x.dtype, x.shape)
        assert back[dtype].tobytes() == x.tobytes()


def test_values_come_back_at_any_depth(references):
    sent = {
        "numbers": [1, -2.5, 1e-300, float("inf"), True, None, "\N{GREEK SMALL LETTER PI}"],
        "nested": {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(3.0)},
        "of jax": (jnp.arange(3, dtype=jnp.bfloat16), {"again": jnp.ones(2)}),
        "path": Path("a/b"),
    }
    back = references.call("protocol.received", value=sent)
    assert back["numbers"] == sent["numbers"]
    for (name, found), wanted in zip(back["nested"].items(), sent["nested"].values(), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        np.testing.assert_array_equal(found, wanted)
    assert back["of jax"][0].dtype == ml_dtypes.bfloat16
    assert back["of jax"][0].tolist() == [0, 1, 2] and back["of jax"][1]["again"].tolist() == [1, 1]
    assert back["path"] == "a/b"


def test_parameters_and_views_of_one_memory_are_sent(references):
    x, transposed, column = references.call("protocol.sharing")
    np.testing.assert_array_equal(x, [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(transposed, x.T)
    np.testing.assert_array_equal(column, [1, 4])


@pytest.mark.parametrize("value", [{1: "a"}, {"$array": "0"}, np.float32(1), {1, 2}])
def test_what_json_would_change_or_lacks_is_refused(own, value):
    with pytest.raises(TypeError):
        own.call("protocol.received", value=value)


def test_an_error_there_is_an_error_here_with_its_traceback(own):
    for _ in range(2):  # the process goes on
        with pytest.raises(
            ReferencesError, match=r"in failing\n.*\n+ValueError: a reference that f"
        ):
            own.call("protocol.failing")
    with pytest.raises(ReferencesError, match="no_such_function"):
        own.call("protocol.no_such_function")
    with pytest.raises(ReferencesError, match="no_such_module"):
        own.call("no_such_module.function")


def test_a_killed_process_is_an_error_and_the_next_call_has_a_new_one(own):
    first = own.call("protocol.process")
    assert own.call("protocol.process") == first
    with pytest.raises(
        ReferencesError, match=r"ended in protocol.killed; its exit code is -9(.|\n)*the last words"
    ):
        own.call("protocol.killed")
    assert own.call("protocol.process") not in (first, os.getpid())


def test_a_process_that_does_not_answer_is_killed(own):
    child = own.call("protocol.process")
    begun = time.monotonic()
    with pytest.raises(ReferencesError, match=r"did not answer for 0.3 s in protocol.slow"):
        own.call("protocol.slow", timeout_s=0.3)
    assert time.monotonic() - begun < 60
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_process_that_was_killed_between_calls_is_an_error(own):
    os.kill(own.call("protocol.process"), 9)
    with pytest.raises(ReferencesError, match="its exit code is -9"):
        own.call("protocol.process")


def test_it_ends_with_the_session():
    process = References()
    child = process.call("protocol.process")
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_it_ends_when_the_tests_process_does(own):
    own.call("protocol.process")
    own._child.stdin.close()
    assert own._child.wait(60) == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_absent_skips_the_test_by_name(own, package):
    reason = f"{package} is not installed in .*: make references"
    with pytest.raises(pytest.skip.Exception, match=reason):
        own.call("protocol.imported_where_it_is_absent", package=package)


def test_another_module_that_is_absent_is_an_error(own):
    with pytest.raises(ReferencesError, match=r"No module named 'safetensors\.no_such'"):
        own.call("protocol.imported", package="safetensors.no_such")


def test_an_override_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv(OVERRIDE, "/no/such/python")
    with pytest.raises(ReferencesError, match="/no/such/python, which does not exist"):
        References()


# -- none of them is imported here -----------------------------------------------------------------


def imports(path):
    """Those of OTHERS that a file imports, by whatever statement or call."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if any(name in text for name in OTHERS) else ():
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("importorskip", "import_module", "__import__"):
                names = [str(node.args[0].value)]
        yield from OTHERS.intersection(name.partition(".")[0] for name in names)


def test_only_the_references_process_imports_them():
    assert set(imports(TESTS / "references" / "families.py")) == {"peft", "torch", "transformers"}
    files = [path for path in TESTS.rglob("*.py") if path.parent != TESTS / "references"]
    found = {path.name: names for path in files if (names := set(imports(path)))}
    assert found == {}


def test_none_is_loaded_in_the_suites_own_process(references):
    """After a call; the fixture asserts it once more at its end."""
    references.call("protocol.imported", package="torch")
    assert not OTHERS & sys.modules.keys()
