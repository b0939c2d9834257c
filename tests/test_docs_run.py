"""The commands of README and docs run, and print what they are shown to print.

Every command of a shell block, and of an output block, is in exactly one of the lists below.
"""

import shlex

import pytest

from jaxspeed.cli.main import main
from tests.support.documents import (
    PAGES,
    blocks,
    masked,
    prepare,
    printed,
    shell_commands,
    shown_outputs,
)

PARALLEL = "--set parallel.remat=full --set zero_optimization.offload_optimizer.device=cpu"
ON = "jaxspeed launch --on"
RANKING = (
    "--set objective.type=ranking:Ranking --set objective.beta=2 --set data.source=ranking:pairs "
    "--set run.output=runs/ranking"
)
PIPELINE = "--set mesh.pipe=4 --set gradient_accumulation_steps=8"

# Under 20 s each on an idle machine; `make test` runs them.
QUICK = (
    "jaxspeed config ds_config.json",
    "jaxspeed config config.json --set zero_optimization.stage=3",
    "jaxspeed config config.json --fix fixed.json",
    "jaxspeed config --schema",
    f"jaxspeed plan configs/tiny.yaml {PIPELINE} --no-compile",
    f"jaxspeed plan configs/tiny.yaml {PARALLEL}",
    "jaxspeed plan configs/llama3_8b.yaml --devices 8 --set mesh.pipe=4 --no-compile",
    "jaxspeed plan configs/llama3_8b.yaml --target v5p:2x2x2",
    f"{ON} slurm --print --processes 16 --nodes 2 --devices-per-process 1 -- train config.yaml",
    f"{ON} kubernetes --print --processes 2 --devices-per-process 8 --image repo/image:1 "
    "--volume runs:/runs -- train config.yaml",
    "jaxspeed config --list",
)
# Longer; `make test-full` runs them, the training ones for few steps.
LONG = (
    "jaxspeed plan configs/llama3_70b.yaml --target v5p:4x4x8",
    "jaxspeed plan configs/gpt3_175b.yaml --target h100:512 --search --write best.yaml",
    "jaxspeed plan configs/gpt_1t.yaml --target v5p:16x16x16 --html plan.html",
    "jaxspeed train configs/tiny.yaml",
    "jaxspeed train configs/tiny.yaml --set run.steps=100",
    f"jaxspeed train configs/tiny.yaml {PIPELINE}",
    "jaxspeed train configs/ds_config.json --set model.family=gpt2 --set model.preset=tiny "
    "--set run.steps=100",
    "jaxspeed launch --processes 4 --devices-per-process 2 --max-restarts 3 "
    "-- train configs/tiny.yaml",
    # of the run that the second one leaves
    "jaxspeed eval runs/tiny",
    "jaxspeed sample runs/tiny --prompt 'import ' --tokens 100",
    "jaxspeed sample configs/tiny.yaml --prompt 'def ' --temperature 0.7 --top-p 0.9 --stop '#'",
    "jaxspeed checkpoint export runs/tiny weights/ --dtype bf16",
)
FEW_STEPS = " --set run.steps=4 --set run.eval_batches=1"
# Need libtpu; `make test-full` runs them where it is installed.
LIBTPU = (
    "jaxspeed plan configs/llama3_70b.yaml --target v5p:4x4x8 --compile",
    "jaxspeed plan configs/llama3_8b.yaml --target v5p:2x2x2 --compile",
)
# Not run here: what they need is absent, or they change the machine.
NOT_RUN = {
    "git clone <this repository> jaxspeed": "a network",
    "cd jaxspeed": "the clone",
    "python3 -m venv .venv": "a network",
    ". .venv/bin/activate": "the venv",
    "pip install -e .": "a network",
    "pip install 'jaxspeed[ray]'": "a network",
    "jaxspeed train configs/tiny.yaml --engine ray --set mesh.data=2 --set parallel.servers=2 "
    "--set zero_optimization.stage=0": "Ray; tests/parameter_server/ray runs it",
    "jaxspeed launch --processes 4 --logs logs -- train configs/tiny.yaml": "it is run with more",
    "jaxspeed launch --hostfile hosts --include worker-0@worker-1:0,2 "
    "-- train config.yaml": "hosts with ssh",
    'pip install "jaxspeed[s3]"': "a network",
    'pip install "jaxspeed[vision]"': "a network",
    **dict.fromkeys(
        (
            "jaxspeed init config.yaml --model base --data photos/metadata.jsonl --lora 16",
            'jaxspeed sample runs/config --chat "What is this?" --image photos/1.jpg',
            "jaxspeed checkpoint export runs/config tuned/ --format hf --merge",
        ),
        "a folder of transformers' and images; tests/data and tests/interop run their parts",
    ),
    "jaxspeed train runs/mine --set run.checkpoints=s3://bucket/mine": "a bucket; tests/run has it",
    "jaxspeed checkpoint verify s3://bucket/mine": "a bucket; tests/checkpoint has it",
    "jaxspeed checkpoint import /ckpts/my_run runs/mine --config config.json": "tests/interop",
    "jaxspeed train runs/mine": "the same",
    "jaxspeed checkpoint export runs/mine exported/ --format safetensors --moments": "the same",
    "jaxspeed train config.yaml": "transformers makes its folder; tests/interop runs it",
    "jaxspeed sample config.yaml --prompt 'def ' --tokens 40": "the same",
    "jaxspeed data show config.yaml": "a folder; tests/data runs it",
    "jaxspeed eval config.yaml": "the same",
    "jaxspeed checkpoint export continued out/ --format hf --dtype bf16": "the same",
    **dict.fromkeys(
        (
            "jaxspeed eval config.yaml --data notes.txt --data texts/",
            "jaxspeed eval config.yaml --data texts/ --json",
            "jaxspeed eval config.yaml --data notes.txt --ema",
            "jaxspeed sample config.yaml --prompt 'def ' --tokens 40 --ema",
            "jaxspeed checkpoint export runs/config averaged/ --format hf --ema",
            "jaxspeed sample copied --prompt 'def ' --tokens 20",
            "jaxspeed checkpoint export copied exported/ --format hf",
        ),
        "tests/cli/test_using_checkpoints.py runs it, where there is a run",
    ),
    **dict.fromkeys(
        (
            "jaxspeed checkpoint export runs/mine tuned/ --format hf",
            "jaxspeed train config.yaml --devices cpu:8 --set run.steps=10",
            "jaxspeed train config.yaml --devices cpu:2",
            "WANDB_MODE=offline jaxspeed train config.yaml",
            "jaxspeed eval config.yaml --data notes.txt",
            "jaxspeed checkpoint export runs/mine averaged/ --format hf --ema",
            "jaxspeed launch --processes 2 -- train config.yaml",
            "jaxspeed checkpoint list runs/mine",
            "cp -r runs/mine elsewhere",
            "jaxspeed sample config.yaml --output elsewhere --prompt 'def ' --tokens 20",
        ),
        "tests/test_docs_everyday.py runs it",
    ),
    "jaxspeed eval runs/mine --tasks my_task.yaml,arc_easy": "lm-eval; tests/interop runs its own",
    "jaxspeed data show config.yaml -n 2": "tests/cli/test_data_show.py runs it",
    "jaxspeed sample config.yaml --chat 'Which fox?'": "tests/run/test_chat_run.py runs it",
    **dict.fromkeys(
        (
            *(
                f"jaxspeed {command} --model base --data chat.jsonl --lora 16"
                for command in ("train", "init config.yaml")
            ),
            "jaxspeed sample runs/base-chat-lora --chat",
            "jaxspeed checkpoint export runs/base-chat-lora merged/ --merge",
        ),
        "tests/test_docs_fine_tuning.py runs it",
    ),
    **dict.fromkeys(
        (f"jaxspeed {command} configs/tiny.yaml {RANKING}" for command in ("train", "eval")),
        "tests/test_docs_objectives.py runs it",
    ),
    "jaxspeed plan config.yaml --target v5e:2x4 --compile --keep step.exe": "a TPU v5e, to be used",
    "jaxspeed train config.yaml --set run.executable=step.exe": "a TPU v5e",
}


def commands():
    """Every command of a shell block."""
    found = [
        block for page in PAGES for block in blocks(page.read_text()) if block.language == "sh"
    ]
    return [command for block in found for command in shell_commands(block.text)]


def test_every_command_is_in_one_of_the_lists():
    lists = [*QUICK, *LONG, *LIBTPU, *NOT_RUN]
    assert sorted(lists) == sorted(set(lists))
    shown = {shown.command for page in PAGES for shown in shown_outputs(page) if shown.command}
    unlisted = set(commands()) - set(lists) - {command.partition(" | ")[0] for command in shown}
    assert not unlisted
    assert not set(lists) - set(commands())


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(prepare(tmp_path))
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.full
def test_the_long_commands_run(tmp_path):
    for command in LONG:
        few = FEW_STEPS if "train configs" in command else ""
        assert printed(command + few, "", tmp_path), command


@pytest.mark.full
@pytest.mark.parametrize("command", LIBTPU)
def test_a_command_runs_that_needs_libtpu(command, tmp_path):
    pytest.importorskip("libtpu")
    assert printed(command, "", tmp_path)


def test_the_readmes_example_prints_what_the_readme_shows(tmp_path):
    (shown,) = shown_outputs(PAGES[0])
    out = printed("", shown.program, tmp_path)
    assert masked(out) == masked(shown.output)
    for line in out.splitlines():
        if "data@" in line:  # the placement table is the same on every machine
            assert line in shown.output.splitlines()
    assert "agrees with the step on one device" in out


SHOWN = {
    f"{page.name}-{i}": shown
    for page in PAGES[1:]
    for i, shown in enumerate(shown_outputs(page), 1)
}


@pytest.mark.full
@pytest.mark.parametrize("name", SHOWN)
def test_an_output_is_what_its_command_prints(name, tmp_path):
    shown = SHOWN[name]
    if "--compile" in shown.command:
        pytest.importorskip("libtpu")
    assert masked(printed(shown.command, shown.program, tmp_path)) == masked(shown.output)
