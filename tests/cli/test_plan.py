"""`jaxspeed plan`: what it says is what training then does, and it makes nothing."""

import io
import json
import subprocess

import jax
import pytest
from rich.console import Console

import jaxspeed
from jaxspeed.communication import Communication
from jaxspeed.config import load_config
from jaxspeed.hlo import CompiledReport
from jaxspeed.placement.show import as_text
from jaxspeed.planner.make_plan import batch_shapes, plan_run
from jaxspeed.run import source_of
from tests.cli.planning import plan, plan_once
from tests.planner import page_read
from tests.run import small

# 2 stages, 4 data ranks; XLA:CPU cannot compile a pipeline in bf16.
STAGES = ("--set", "mesh.pipe=2", "--set", "bf16.enabled=false")
STAGES += ("--set", "model.config.dropout=0")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="module")
def planned(config):
    """A pipeline's plan as data, compiled."""
    done = plan(config, "--json", "--devices", "8", *STAGES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


OFFLOAD = (
    "--devices",
    "8",
    "--no-compile",
    "--set",
    "parallel.remat=full",
    "--set",
    "zero_optimization.offload_optimizer.device=cpu",
)


def test_offloaded_arrays_have_a_column_and_host_transfers_a_table(config):
    said = plan(config, *OFFLOAD).stdout
    assert "in host memory (from the table)" in said
    assert "host transfers, per device and step" in said
    assert "lower bounds, with the link and peak of A100 (this device's link is unknown)" in said


def test_host_transfers_are_there_as_data(config):
    found = json.loads(plan(config, "--json", *OFFLOAD).stdout)
    waiting = {role: row["host_bytes_per_device"] for role, row in found["state"].items()}
    moved = sum(size for role, size in waiting.items() if role in ("master", "opt"))
    assert moved > 0 and waiting["param"] == waiting["grad"] == 0
    crossed = found["transfer"]
    assert crossed["to_host"] == {"optimizer": moved}
    # On simulated devices one number of each parameter puts the loops over them in turn.
    turns = crossed["to_device"]["optimizer"] - moved
    assert turns % 4 == 0 and 0 <= turns <= 0.01 * moved
    assert crossed["seconds"] == (2 * moved + turns) / crossed["bytes_per_second"]
    assert found["compiled"] is None


@pytest.mark.sampled
def test_what_moves_nothing_has_no_such_table(planned):
    assert planned["transfer"] is None
    assert {row["host_bytes_per_device"] for row in planned["state"].values()} == {0}


def test_devices_mesh_and_batch_are_in_the_data(planned):
    assert planned["devices"]["count"] == 8 and planned["devices"]["simulated"]
    assert {axis: n for axis, n in planned["mesh"].items() if n > 1} == {"pipe": 2, "data": 4}
    assert planned["batch"] == {"train": 16, "micro": 2, "accumulation": 2}


def test_the_compiled_steps_arguments_are_the_tables_state(planned):
    """Without the accumulated gradients, which are inside of it, and with the batch."""
    state = {role: found["bytes_per_device"] for role, found in planned["state"].items()}
    batch = 2 * (16 // 4) * 17 * 4  # tokens and segment_ids of a data rank
    given = sum(state.values()) - state["grad"] + batch
    scalars = 64
    assert given <= planned["compiled"]["argument_bytes"] <= given + scalars


def test_the_schedule_is_there_as_data(planned):
    pipeline = planned["pipeline"]
    assert (pipeline["stages"], pipeline["micro_batches"], pipeline["ticks"]) == (2, 2, 4)
    assert pipeline["bubble"] == pytest.approx(1 / 3)


def test_the_compilers_figures_have_the_names_of_the_report(planned):
    compiled = planned["compiled"]
    assert all(compiled[f"{name}_bytes"] >= 0 for name in ("temp", "output", "host"))
    assert compiled["flops"] > 0
    assert any(one["kind"] == "collective-permute" for one in compiled["collectives"])


def test_nothing_is_made(config):
    before = len(jax.live_arrays())
    done = plan(config, "--no-compile", *STAGES)
    assert done.returncode == 0, done.stderr
    assert len(jax.live_arrays()) == before
    assert not (config.parent / "run").exists()


def test_the_text_has_the_totals_the_chart_and_the_costs(config):
    shown = plan(config, "--no-compile", *STAGES)
    assert shown.returncode == 0, shown.stderr
    for text in ("parameters on 8 devices", "param", "needed: ", "stage 1 F", "bubble", "messages"):
        assert text in shown.stdout, text
    assert "compiled" not in shown.stdout


def test_the_text_of_a_compiled_plan_fits_80_columns(config, planned):
    overrides = [word for word in STAGES if "=" in word]
    source = source_of(load_config(config, overrides), name=config)
    text = io.StringIO()
    Console(file=text, width=80).print(plan_run(source))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text.getvalue()  # where Rich cuts a cell off
    kinds = {one["kind"] for one in planned["compiled"]["collectives"]}
    assert all(any(line.split()[:1] == [kind] for line in lines) for kind in kinds)


def test_a_collective_along_many_axes_fits_80_columns():
    axes = ("pipe", "replica", "data", "tensor")
    along = Communication(
        "collective-permute",
        axes,
        8**6,
        999,
        "hlo",
        "bf16+f32",
        8**5,
        group_size=16,
        in_accumulation=True,
    )
    report = CompiledReport(*[10**9] * 8, (along,))
    text = as_text(report, width=80)
    words = [*axes, "bf16+f32", "999", "262 MB", "(ring)"]
    assert "…" not in text and all(word in text for word in words), text


def test_without_stages_there_is_no_schedule(config):
    found = json.loads(plan(config, "--no-compile", "--json").stdout)
    assert found["pipeline"] is None and found["compiled"] is None
    assert "stage 0" not in plan(config, "--no-compile").stdout


def test_no_corpus_need_be_here(config):
    done = plan(config, "--no-compile", "--set", "data.path=/nowhere/*.txt")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("segments", ["true", "false"])
def test_the_shapes_are_those_of_the_data(config, segments):
    source = source_of(load_config(config, [f"data.document_masks={segments}"]), name=config)
    read = source.corpus().train.batch(0, 16)
    shapes = batch_shapes(source, 16)
    assert {k: (x.shape, x.dtype) for k, x in shapes.items()} == {
        k: (x.shape, x.dtype) for k, x in read.items()
    }


MISTAKES = {
    "no such config": (["/nowhere/x.yaml"], "no such file"),
    "unknown key": (["CONFIG", "--set", "mesh.pip=2"], "Did you mean"),
    "no such devices": (["CONFIG", "--devices", "abacus"], "cpu, gpu or tpu"),
    "another number of devices": (["CONFIG", "--devices", "3"], "simulate(3)"),
    "a mesh that does not fit": (["CONFIG", "--set", "mesh.tensor=3"], "multiple of 3"),
    "too few micro-batches": (["CONFIG", "--set", "mesh.pipe=4"], "Needs at least 4"),
    "too few layers": (
        ["CONFIG", "--set", "mesh.pipe=4", "--set", "gradient_accumulation_steps=4"],
        "mesh.pipe up to 2",
    ),
    "no model": (["configs/ds_config.json"], "no model"),
    "epochs of data that are absent": (
        ["CONFIG", "--target", "cpu:8", "--set", "run.epochs=1", "--set", "data.path=/nowhere"],
        "With run.steps a plan needs no data",
    ),
    "no config": ([], "plan needs a CONFIG"),
    "unknown target": (["CONFIG", "--target", "h101:8"], 'Did you mean "h100"?'),
    "a torus as a count": (["CONFIG", "--target", "v5p:8"], "8 chips are v5p:2x2x2"),
    "a torus that cannot hold the mesh": (
        ["CONFIG", "--target", "tpu7x:4x1x1", "--set", "mesh.tensor=4"],
        "the first two dims must be even",
    ),
    "a target and devices": (["CONFIG", "--target", "cpu:8", "--devices", "8"], "give only one"),
    "no patience": (["CONFIG", "--target", "cpu:8", "--patience", "0"], "more than 0"),
    "no such hardware": (["CONFIG", "--target", "cpu:8", "--hardware", "/nowhere"], "No such file"),
    "a target of another number": (["CONFIG", "--target", "h100:16"], "simulate(16)"),
    "a mesh that a target does not fit": (
        ["CONFIG", "--target", "h100:8", "--set", "mesh.tensor=3"],
        "multiple of 3",
    ),
    "a batch that does not divide": (
        ["CONFIG", "--target", "h100:8", "--set", "train_batch_size=12"],
        "train_batch_size",
    ),
    "nothing to keep": (
        ["CONFIG", "--target", "cpu:8", "--keep", "x.exe"],
        "--keep needs --target",
    ),
    "no way to keep it": (
        ["CONFIG", "--target", "h100:8", "--compile", "--keep", "x.exe"],
        "jax cannot serialize it",
    ),
    "no place for the page": (["CONFIG", "--html", "/nowhere/x.html"], "no file can be written"),
    "no compiler": (["CONFIG", "--target", "v100-32g:8", "--compile"], "no compiler here supports"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_no_traceback(config, name):
    words, hint = MISTAKES[name]
    done = plan(*(config if word == "CONFIG" else word for word in words))
    assert done.returncode == 2, done.stderr
    assert hint in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == 1


def test_a_plan_of_epochs_counts_the_tokens_of_the_data(config):
    """2,110 samples of 16 tokens, 16 a step: 2 epochs are 264 steps."""
    words = ("--target", "h100:8", "--json")
    figures = [
        json.loads(plan(config, *words, "--set", length).stdout)
        for length in ("run.epochs=2", "run.steps=264")
    ]
    assert figures[0]["time"]["run"] == figures[1]["time"]["run"]
    assert figures[0]["time"]["run"]["tokens"]


def test_the_plan_of_a_target_has_its_devices_and_their_memory(config):
    said = plan_once(config, "--target", "h100:8", "--json")
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["devices"] == {
        "count": 8,
        "platform": "cuda",
        "kind": "NVIDIA H100 80GB HBM3",
        "simulated": False,
    }
    assert found["target"]["name"] == "h100:8" and found["target"]["memory"] == 84942979072
    assert found["compiled"] is None and found["outcome"] is None  # unless asked
    text = plan_once(config, "--target", "h100:8").stdout
    assert "(h100:8, NVIDIA H100 80GB HBM3)" in text and "available: 84.9 GB per device" in text


def test_the_plan_of_a_target_has_memory_by_component(config):
    found = json.loads(plan_once(config, "--target", "v5e:2x4", "--json").stdout)
    memory = found["memory"]
    assert memory["verdict"] == "fits"
    assert memory["device"] == memory["state"] + memory["temporary"]
    assert memory["device"] == sum(c["bytes"] for c in memory["components"] if not c["host"])
    assert {"optimizer", "batch"} <= {component["name"] for component in memory["components"]}
    # A TPU holds the gradients of a model as small as this on the chip.
    memory = json.loads(plan_once(config, "--target", "h100:8", "--json").stdout)["memory"]
    assert "gradients" in {component["name"] for component in memory["components"]}
    for target in ("v5e:2x4", "h100:8"):
        assert "expected to fit" in plan_once(config, "--target", target).stdout


def test_the_page_holds_what_json_prints(config, tmp_path):
    path = tmp_path / "plan.html"
    done = plan(config, "--target", "v5e:2x4", "--json", "--html", path)
    assert done.returncode == 0, done.stderr
    assert page_read.embedded(path.read_text("utf-8")) == json.loads(done.stdout)


def test_the_page_of_a_pipeline_has_its_schedule(config, tmp_path):
    path = tmp_path / "plan.html"
    done = plan(config, "--devices", "8", "--no-compile", "--html", path, *STAGES)
    assert done.returncode == 0, done.stderr
    found = page_read.embedded(path.read_text("utf-8"))
    assert found["pipeline"]["work"] and not found["memory"]  # no estimate without a target


def test_of_a_target_the_link_to_host_memory_is_the_chip_s(config):
    waits = OFFLOAD[OFFLOAD.index("--set") :]
    found = json.loads(plan(config, "--json", "--target", "h100:8", *waits).stdout)
    assert found["transfer"]["bytes_per_second"] == 64e9


@pytest.mark.full  # test_executable.py asks for one
def test_a_step_compiled_for_a_target_is_in_the_text_and_in_the_data(config):
    words = ("--target", "cpu:8", "--compile")
    done = plan(config, *words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    compiled, outcome = found["compiled"], found["outcome"]
    sizes = [compiled[f"{name}_bytes"] for name in ("argument", "temp", "output")]
    assert outcome["fits"] and outcome["device_bytes"] == sum(sizes) - compiled["alias_bytes"]
    assert outcome["refused"] is None and outcome["seconds"] > compiled["compile_seconds"] > 0


TINY_CHIP = """
crumb:
  platform: cpu
  kinds: [crumb]
  memory: 1 kB
  flops: {bf16: 1T, fp32: 1T}
  bandwidth: 1 GB/s
  link: 1 GB/s
  links: 1
  outside: 1 GB/s
  host_link: 1 GB/s
  host_memory: 1 GB
  node: 8
  compiler: {}
"""


@pytest.mark.full
def test_what_does_not_fit_is_said_with_what_would_help_and_ends_with_1(config, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(TINY_CHIP)
    done = plan(config, "--target", "crumb:8", "--hardware", path, "--compile")
    assert done.returncode == 1, done.stderr
    assert "does not fit: it needs" in done.stdout and "largest saving:" in done.stdout


@pytest.mark.full  # planner/test_search_advice.py has what would help
def test_what_is_not_expected_to_fit_is_said_with_what_would_help(config, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(TINY_CHIP.replace("platform: cpu", "platform: cuda"))
    said = plan(config, "--target", "crumb:8", "--hardware", path)
    assert said.returncode == 0, said.stderr
    assert "not expected to fit: " in said.stdout and "largest saving:" in said.stdout


def test_the_targets_are_listed_with_their_sources():
    text = plan("--targets")
    assert text.returncode == 0 and "v100-32g*" in text.stdout
    found = json.loads(plan("--targets", "--json").stdout)
    assert found["h100"]["memory"] == 84942979072 and found["h100"]["compiles"]
    assert found["h100"]["sources"]["link"].startswith("900 GB/s of NVLink")


def test_from_python_it_is_the_same(config):
    found = jaxspeed.plan(config, "v5e:2x4")
    told = json.loads(plan_once(config, "--target", "v5e:2x4", "--json").stdout)
    assert json.loads(json.dumps(found.figures())) == told


@pytest.mark.full  # as `config` in test_commands.py
def test_its_reader_may_end_before_it_does(config):
    line = " ".join(small.command("plan", config, "--no-compile", *STAGES)) + " | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        env=small.environment(),
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "parameters on 8 devices" in done.stdout
