"""Each key that is `honoured` has a test that fails without its effect: honoured_keys.txt.

`python -m tests.support.removed_keys` removes them one by one, and so do the tests marked `full`.
"""

import ast
import json
from pathlib import Path

import pytest

from jaxspeed.config import Config
from jaxspeed.config.tree import VOCABULARY
from jaxspeed.errors import ConfigError
from tests.support.removed_keys import ROOT, loaded_without, pairs, run_pytest

pytestmark = pytest.mark.fast

PAIRS = pairs()
FILES = sorted({test.split("::")[0] for test in PAIRS.values()})


def test_no_honoured_key_is_missing_and_none_is_there_that_is_not_honoured():
    assert list(PAIRS) == [path for path, key in VOCABULARY.items() if key.verdict == "honoured"]


@pytest.mark.parametrize("file", FILES)
def test_each_test_of_the_list_exists(file):
    found = {node.name for node in ast.parse((ROOT / file).read_text()).body if is_test(node)}
    named = {test.split("::")[1] for test in PAIRS.values() if test.startswith(f"{file}::")}
    assert {name.split("[")[0] for name in named} <= found


def is_test(node):
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


# -- how a key's effect is removed ----------------------------------------------------------------


def test_a_config_without_a_key_is_as_if_the_file_did_not_have_it():
    groups = [{"pattern": "a", "frozen": True}, {"pattern": "b", "lr_factor": 2.0}]
    given = {
        "train_batch_size": 8,
        "gradient_clipping": 3.0,
        "zero_optimization": {"cpu_offload": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.5, "eps": 1e-3}, "groups": groups},
    }

    def without(key):
        found = set()
        with loaded_without(key, found):
            config = Config.load(given)
        assert key in found
        return config

    assert without("gradient_clipping").gradient_clipping == 1.0
    assert without("optimizer.params.eps").optimizer.params["eps"] == 1e-8
    assert not any(group.frozen for group in without("optimizer.groups.frozen").optimizer.groups)
    offload = without("zero_optimization.cpu_offload").zero_optimization.offload_optimizer
    assert offload.device == "none"
    assert without("optimizer.type").optimizer.type != "Adam"
    assert Config.load(given).gradient_clipping == 3.0


def test_what_only_the_absence_of_a_key_makes_an_error_is_none():
    stages = {"pipeline_schedule": "interleaved", "pipeline_chunks": 3}
    with loaded_without("parallel.pipeline_schedule", set()):
        assert Config(parallel=stages).parallel.pipeline_schedule == "1f1b"
    with pytest.raises(ConfigError):
        Config(parallel=stages | {"pipeline_schedule": "1f1b"})


# -- each effect, removed -------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
def test_without_the_effect_of_a_key_its_test_fails(file, tmp_path):
    keys = [key for key, test in PAIRS.items() if test.startswith(f"{file}::")]
    outcomes = tmp_path / "outcomes.jsonl"
    tests = sorted({PAIRS[key] for key in keys})
    done = run_pytest([*tests, f"--removals={outcomes}"], capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
    assert sorted(row["key"] for row in rows if row["seen"]) == sorted(keys)


def test_what_reads_no_key_but_loads_it_is_blind_to_it():
    assert Config(run={"seed": 3}).run.steps is None


@pytest.mark.full
def test_a_test_that_does_not_see_the_effect_is_reported():
    test = str(Path(__file__).relative_to(ROOT))
    blind = f"{test}::test_what_reads_no_key_but_loads_it_is_blind_to_it"
    done = run_pytest(["--find", "--keys=run.seed", blind], capture_output=True)
    assert done.returncode == 1
    assert "does not fail without run.seed" in done.stdout
