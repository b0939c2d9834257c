"""Each config for large devices is within a tenth of what a search finds on the target it names."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspeed

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TARGETS = {
    path.name: found[1]
    for path in CONFIGS
    if (found := re.search(r"^#.*\bTarget: (\S+)$", path.read_text(), re.MULTILINE))
}


def test_each_config_that_has_its_model_and_simulates_no_devices_names_a_target():
    configs = {path.name: jaxspeed.Config.load(path) for path in CONFIGS}
    given = {name: each.given["run"] for name, each in configs.items() if not each.model.pretrained}
    assert set(TARGETS) == {name for name, run in given.items() if "devices" not in run}
    assert len(TARGETS) == 11


@pytest.mark.full  # a search takes 20 s to minutes
@pytest.mark.parametrize("name", TARGETS)
def test_a_config_is_within_a_tenth_of_a_search_on_its_target(name):
    arguments = ["plan", f"configs/{name}", "--target", TARGETS[name], "--search", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxspeed", *arguments, "--search-seconds", "600"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    search = json.loads(done.stdout)["search"]
    candidates, best = search["candidates"], search["candidates"][search["best"]]
    own = next(each for each in candidates if not each["set"])
    assert own["fits"] == "fits"
    assert own["seconds"] <= 1.1 * best["seconds"], best["set"]
    assert search["tried"] >= 10
