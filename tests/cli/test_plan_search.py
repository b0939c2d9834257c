"""`jaxspeed plan --search`: a config that is estimated to be faster, and the same batch."""

import json

import pytest
import yaml

import jaxspeed
from jaxspeed.config import load_config
from jaxspeed.planner import search_run
from jaxspeed.planner.compile.outcome import Outcome, Refusal
from jaxspeed.planner.compile.workers import Inline
from jaxspeed.planner.make_plan import plan_run
from jaxspeed.planner.search.candidate import choice_of
from jaxspeed.run import source_of
from tests.cli.planning import plan
from tests.engine.tiny import Listed, batch, squared_error
from tests.run import small

TARGET = "h100:8"
FEW = ("--set", "autotuning.enabled=true", "--set", "autotuning.tuner_num_trials=5")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def searched(config):
    """(what a search of few candidates said, the file that it wrote)."""
    path = config.parent / "chosen.yaml"
    done = plan(config, "--target", TARGET, "--search", *FEW, "--write", path, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # of progress nothing is said in a pipe
    return json.loads(done.stdout), path


@pytest.mark.sampled
def test_the_config_as_it_is_is_a_candidate_and_the_best_is_no_slower(searched):
    told = searched[0]["search"]
    as_it_is = [each for each in told["candidates"] if not each["set"]]
    assert len(as_it_is) == 1 and as_it_is[0]["fits"] == "fits"
    best = told["candidates"][told["best"]]
    assert best["seconds"] <= as_it_is[0]["seconds"] == searched[0]["time"]["step"]
    assert as_it_is[0]["device_bytes"] == searched[0]["memory"]["device"]
    assert told["global_batch"] == 16
    assert 2 <= len(told["candidates"]) <= 5 < told["considered"]


def test_what_was_written_loads_and_plans_to_the_same_figures(searched, config):
    told, path = searched
    best = told["search"]["candidates"][told["search"]["best"]]
    assert best["set"]  # else this would compare the config with itself
    written = yaml.safe_load(path.read_text())
    assert written["run"]["devices"] == "cpu:8"  # the user's own, and not what simulates
    again = json.loads(plan(path, "--target", TARGET, "--json").stdout)
    assert again["batch"]["train"] == 16
    assert again["memory"]["device"] == best["device_bytes"]
    assert again["time"]["step"] == pytest.approx(best["seconds"])
    assert path.read_text().startswith("# Chosen by jaxspeed plan --search for h100:8")


MISTAKES = {
    "no target": (["--search"], "--search needs a --target"),
    "nothing to write": (["--target", TARGET, "--write", "x.yaml"], "give --search too"),
    "another kind of file": (
        ["--target", TARGET, "--search", "--write", "x.toml"],
        ".yaml, .yml or .json",
    ),
    "no time": (["--target", TARGET, "--search", "--search-seconds", "0"], "more than 0"),
    "a batch out of bounds": (
        ["--target", TARGET, "--search", *FEW, "--set", "autotuning.max_train_batch_size=8"],
        "train_batch_size is 16",
    ),
    "an elastic batch": (
        [
            *("--target", TARGET, "--search", "--set", "elasticity.enabled=true"),
            *("--set", "train_batch_size=null", "--set", "gradient_accumulation_steps=null"),
            *("--set", "elasticity.max_train_batch_size=24"),
            *("--set", "elasticity.micro_batch_sizes=[1]"),
        ],
        "Set elasticity.enabled to false",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(config, name):
    words, hint = MISTAKES[name]
    done = plan(config, *words)
    assert done.returncode == 2, done.stderr
    assert hint in " ".join(done.stderr.split()), done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr


def test_a_model_that_cannot_be_sent_to_other_processes_is_searched_in_this_one():
    given = {
        "train_batch_size": 32,
        "autotuning": {"enabled": True, "fast": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "data": {"source": "tests.cli.test_plan_search:samples", "samples": 64},
    }
    made = jaxspeed.plan(
        given, "h100:8", model=lambda rngs: Listed(rngs=rngs), loss_fn=squared_error, search=True
    )
    assert made.search is not None and made.search.winner is not None
    assert {each.choice.mesh for each in made.search.candidates} == {(1, 1, 8, 1, 1, 1)}
    assert len({(each.choice.stage, each.choice.micro) for each in made.search.candidates}) > 3


def samples():
    """One sample after another of the model's own."""
    whole = batch(64)
    return [{name: x[i] for name, x in whole.items()} for i in range(64)]


@pytest.mark.sampled
def test_with_compile_the_first_that_the_compiler_takes_is_the_best(config, monkeypatch):
    """And those that it does not are told of."""
    asked = []

    def compile_for(target, job, patience):
        asked.append(choice_of(job.source.config, 8))
        refused = Refusal(99 * 10**9, "RESOURCE_EXHAUSTED") if len(asked) == 1 else None
        return Outcome(None if refused else Report(), refused, 1.0)

    class Report:
        step_bytes, step_host_bytes = 3 * 10**9, 0

    monkeypatch.setattr(search_run, "compile_for", compile_for)
    monkeypatch.setattr(search_run, "_pool", lambda problem: Inline(problem.estimate))
    words = ["run.devices=cpu:8", "autotuning.enabled=true", "autotuning.tuner_num_trials=4"]
    source = source_of(load_config(config, words), name="plan")
    target = jaxspeed.planner.api.target_of(TARGET)
    made = plan_run(source, target=target, compiling=True, search_seconds=60)
    found = made.search
    assert len(asked) == 2 and found.winner.choice == asked[1]
    first = next(each for each in found.candidates if each.choice == asked[0])
    assert first.lost == "the compiler: needs 99 GB of 84.9 GB"
    assert made.fits and "compiled: 3 GB per device, fits" in str(made)


@pytest.mark.full
def test_where_a_config_does_not_fit_advice_is_given(tmp_path, config):
    path = tmp_path / "own.yaml"
    path.write_text(SMALL_CHIP)
    made = jaxspeed.plan(config, "crumb:8", hardware=path)
    found = made.figures()
    assert found["memory"]["verdict"] == "does not fit"
    single, cheapest = found["advice"]["single"], found["advice"]["cheapest"]
    assert single["frees"] > 0
    assert single["device_bytes"] == found["memory"]["device"] - single["frees"]
    assert cheapest is None or cheapest["device_bytes"] <= found["target"]["memory"]
    assert "largest saving: " in str(made)


def test_where_it_fits_there_is_no_advice(searched):
    assert searched[0]["memory"]["verdict"] == "fits" and searched[0]["advice"] is None


SMALL_CHIP = """
crumb:
  platform: cuda
  kinds: [crumb]
  memory: 60 kB
  flops: {bf16: 1T, fp32: 1T}
  bandwidth: 1 GB/s
  link: 1 GB/s
  links: 1
  outside: 1 GB/s
  host_link: 1 GB/s
  host_memory: 1 GB
  node: 8
"""
