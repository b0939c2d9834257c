"""A search result as a table, as figures and as a config."""

import json
import re
from dataclasses import replace

import pytest

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import target_of
from jaxspeed.hlo import CompiledReport
from jaxspeed.planner.compile.outcome import Outcome, Refusal
from jaxspeed.planner.search.candidate import choice_of, keys_of
from jaxspeed.planner.search.candidate_estimate import Estimate, why_lost
from jaxspeed.planner.search.result import make_result, refuse_path, with_outcomes, write_config
from jaxspeed.planner.search.walk import best_of
from tests.planner.choices import LIMIT, made_up, space_of

TARGET = target_of("h100:8")
WRITTEN = {
    "train_batch_size": 64,
    "mesh": {"tensor": 2},
    "zero_optimization": {"stage": 1, "cpu_offload": True},
    "activation_checkpointing": {"number_checkpoints": 4},
}
SPACE = space_of(WRITTEN, 8)
N = TARGET.chip.memory


def found(seed=1, every=397):
    """Of some of all choices."""
    estimate, _ = made_up(SPACE, seed)
    some = list(SPACE.all())[::every]
    done = {c: estimate(c) for c in some}
    words = {c: keys_of(WRITTEN, SPACE.base, c, SPACE.samples) for c in some}
    pairs = {c: (done[c], words[c]) for c in some}
    return make_result(TARGET, SPACE.samples, "tokens", 9999, 12.0, pairs, best_of(done))


@pytest.mark.sampled
def test_candidates_come_by_time_and_the_best_is_the_first_with_head_room():
    figures = found().figures()
    seconds = [each["seconds"] for each in figures["candidates"]]
    assert seconds == sorted(seconds)
    roomy = [i for i, each in enumerate(figures["candidates"]) if each["fits"] == "fits"]
    assert figures["best"] == roomy[0]
    assert figures["candidates"][figures["best"]]["lost"] is None
    assert all(each["lost"] for i, each in enumerate(figures["candidates"]) if i != figures["best"])
    assert json.loads(json.dumps(figures)) == figures


def test_the_table_fits_80_columns_and_has_the_config_as_it_is():
    shown = str(found())
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert "best: " in shown and re.search(r"^\d+\*", shown, re.MULTILINE)


@pytest.mark.default_cases("out.yaml")
@pytest.mark.parametrize("name", ["out.yaml", "out.json"])
def test_the_written_config_sets_the_choice(tmp_path, name):
    made = found()
    best = made.winner
    write_config(tmp_path / name, WRITTEN, made, "mine.yaml")
    loaded = Config.load(tmp_path / name)
    assert choice_of(loaded, 8) == best.choice
    assert loaded.batch(best.choice.ranks, best.choice.pipe).train == 64
    kept = {key: value for key, value in WRITTEN.items() if key == "train_batch_size"}
    assert {key: loaded.given[key] for key in kept} == kept


def test_a_yaml_starts_with_a_comment_on_the_search(tmp_path):
    made = found()
    write_config(tmp_path / "out.yaml", WRITTEN, made, "mine.yaml")
    head = [x for x in (tmp_path / "out.yaml").read_text().splitlines() if x.startswith("#")]
    text = "\n".join(head)
    assert "h100:8 from mine.yaml" in text and made.winner.name in text
    assert all(key in text for key in made.winner.keys)


@pytest.mark.parametrize(
    ("path", "searching", "hint"),
    [
        ("x.yaml", False, "--search"),
        ("x.txt", True, ".yaml"),
        ("/nowhere/x.yaml", True, "existing folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_search(path, searching, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        refuse_path(path, searching)


ROOMY = Estimate(N // 2, 0, N, N, "fits", 2.0, 1.0, 0.5, {"compute": 1.5, "pipeline": 0.5})


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (replace(ROOMY, device=93_000_000_000, fits="does not fit"), "needs 93 GB of 85"),
        (replace(ROOMY, device=84_990_000_000, fits="does not fit"), "needs 85.0 GB of 84.9"),
        (replace(ROOMY, host=2 * N, fits="does not fit"), "needs 170 GB of 85 of host memory"),
        (replace(ROOMY, device=80_000_000_000, fits="tight"), "too little headroom: 80 GB of 85"),
        (
            replace(ROOMY, seconds=2.7, parts={"compute": 1.5, "pipeline": 1.2}),
            "44% pipeline bubble",
        ),
        (
            replace(ROOMY, seconds=2.4, parts={"compute": 1.9, "pipeline": 0.5}),
            "compute takes 400 ms more",
        ),
        (
            replace(ROOMY, seconds=2.3, parts={**ROOMY.parts, "all-gathers of parameters": 0.4}),
            "all-gathers of parameters take 400 ms more",
        ),
        (replace(ROOMY, seconds=2.001), "as fast within half a percent"),
        (Estimate(refused="mesh.tensor: 25 heads"), "mesh.tensor: 25 heads"),
    ],
)
def test_the_reason_why_a_candidate_lost(lost, said):
    assert why_lost(lost, ROOMY) == said


def compiled(needed):
    """A compile outcome of a step that needs this many bytes."""
    if needed is None:
        return Outcome(None, Refusal(2 * N, "out of memory"), 1.0)
    sizes = dict.fromkeys(CompiledReport.__dataclass_fields__, 0)
    report = CompiledReport(**{**sizes, "collectives": (), "others": {}, "temp_bytes": needed})
    return Outcome(report, None, 1.0)


def test_if_the_best_does_not_fit_when_compiled_the_next_is_the_best():
    made = found()
    first = made.best
    second = next(
        i for i, each in enumerate(made.candidates) if i > first and each.estimate.fits == "fits"
    )
    proved = with_outcomes(made, [(first, compiled(None)), (second, compiled(N // 2))])
    assert proved.best == second and proved.proved
    rows = proved.figures()["candidates"]
    assert rows[first]["lost"] == "the compiler: needs 170 GB of 84.9 GB"
    assert rows[first]["compiled"]["fits"] is False and rows[second]["lost"] is None
    assert rows[second]["compiled"] == {"device_bytes": N // 2, "host_bytes": 0, "fits": True}


def test_if_none_fits_when_compiled_there_is_no_best():
    made = found()
    proved = with_outcomes(made, [(made.best, compiled(None))])
    assert proved.best is None and proved.proved is False
    assert "none of them" in str(proved)


def test_where_nothing_fits_there_is_no_best():
    choice = SPACE.base
    pairs = {choice: (Estimate(2 * LIMIT, 0, LIMIT, LIMIT, "does not fit", 1.0), {})}
    made = make_result(TARGET, 64, "tokens", 1, 1.0, pairs, best_of({choice: pairs[choice][0]}))
    assert made.best is None and "none of them is expected to fit" in str(made)
    assert made.figures()["candidates"][0]["lost"] == "needs 2.0 GB of 1.0"
