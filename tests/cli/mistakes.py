"""The mistakes of mistakes.yaml, made one by one; `python -m tests.cli.mistakes` writes the table.

Each is made in a folder of its own, in which the files of `shared_files` are.
"""

import contextlib
import copy
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "notes" / "mistakes.md"
SECONDS = {"flags": 0.5, "files": 3.0, "trace": float("inf")}  # of CPU
# A module of a user: what a mistake's own mine.py has replaces it.
MINE = """import jax, jax.numpy as jnp, numpy as np
from flax import nnx
rows = [{"x": np.full(8, n, np.float32)} for n in range(16)]
def make(rngs): return nnx.Linear(8, 8, rngs=rngs)
def loss(model, batch): return jnp.mean(model(batch["x"]) ** 2)
"""
SCRIPT = """import jaxspeed, mine
from flax import nnx
config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
"""
# Each phase of a start is printed once it is over, so that a compilation shows.
CHILD = """import sys
from jaxspeed.cli import main
if {shows}:
    from jaxspeed.metrics import start_lines
    start_lines.LASTS = 0
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Mistake:
    """A mistake, and words of the message that it must have."""

    name: str
    source: str  # a tracker's repository#number, or empty
    run: str
    written: str  # what is wrong, as the table has it
    config: dict[str, Any]
    script: str | None
    files: dict[str, Any]
    says: tuple[str, ...]
    within: str
    code: int


@dataclass(frozen=True)
class Outcome:
    """What the command printed, its exit code, and its CPU seconds."""

    code: int
    text: str
    seconds: float = 0.0

    @property
    def message(self) -> str:
        """The error, or else the warnings, on one line."""
        lines = " ".join(self.text.split())
        match = re.search(r"(?:\berror: |Error: )(.*)", lines)
        return match[1] if match else lines


def mistakes() -> list[Mistake]:
    """All mistakes of mistakes.yaml."""
    tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return [_mistake(tree, **{**entry, "name": entry["id"]}) for entry in tree["mistakes"]]


def _mistake(tree: Any, *, name: str, says: list[str], within: str, **keys: Any) -> Mistake:
    config = copy.deepcopy(tree["base"])
    for section, values in tree["like"].get(keys.get("like"), {}).items():
        config[section] = copy.deepcopy(values)
    changed = keys.get("set", {})
    for path, value in changed.items():
        *above, last = path.split(".")
        node = config
        for part in above:
            node = node.setdefault(part, {})
        is_section = isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = {**node[last], **value} if is_section and not above else value
    files = keys.get("files", {})
    if "like" in keys and keys["like"] == "mine":
        files = {**files, "mine.py": MINE + files.get("mine.py", "")}
    parts = [json.dumps({k: v}, ensure_ascii=False)[1:-1] for k, v in changed.items()]
    own = keys.get("files", {})
    parts += [f"{file}: {_shown(content)}" for file, content in own.items()]
    run = keys.get("run", "train c.json")
    shown = [] if run == "train c.json" else [run]
    written = "; ".join([*shown, *parts]) or keys.get("python", "")
    source = keys.get("from", "")
    script = keys.get("python")
    return Mistake(name, source, run, written, config, script, files, tuple(says), within,
                   keys.get("code", 1 if script else 2))  # fmt: skip


def _shown(content: Any) -> str:
    if isinstance(content, dict | list):
        return json.dumps(content)
    return content.decode("latin-1") if isinstance(content, bytes) else content.strip()


def shared_files(where: Path, runs: bool = True) -> Path:
    """Texts, conversations, pairs, labels, models' folders and, if `runs`, a finished run."""
    from tests.data.chat_examples import chat, template, tokenizer_folder

    rng = np.random.default_rng(0)
    (where / "corpus.txt").write_text(" ".join(rng.choice(["the", "of", "to", "and"], 4000)))
    records = {
        "chat.jsonl": {"messages": chat("the of", "to and")},
        "pairs.jsonl": {"prompt": "the", "chosen": "to", "rejected": "of"},
        "texts.jsonl": {"text": "the to and of " * 20},
    }
    for name, record in records.items():
        write_lines(where / name, [record] * 40)
    label = {"prompt": "the", "completion": "to"}
    write_lines(where / "labels.jsonl", [label | {"label": n % 2 == 0} for n in range(40)])
    for name, size in (("base", 400), ("plain", 400), ("other", 400), ("small", 256)):
        more = {} if name == "plain" else {"chat_template": template("chatml")}
        _model(where / name, size)
        if name != "small":
            tokenizer_folder(where / name, **more)
    tokenizer = json.loads((where / "other" / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (where / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    tree = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    base = tree["base"]
    (where / "done.json").write_text(json.dumps(base))
    run = where / "runs" / "done"
    if runs:
        words = ["train", "done.json", "--output", str(run), "-q"]
        done = subprocess.run(_command(False, words), cwd=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        run.mkdir(parents=True)
        (run / "run.yaml").write_text(json.dumps(base))
    return where


def _model(folder: Path, vocab: int) -> None:
    """A small Llama in Hugging Face's files."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"embed_tokens": (vocab, 16), "norm": (16,)}
    for n in range(2):
        layer = f"layers.{n}"
        shapes |= {f"{layer}.self_attn.{x}_proj": (16, 16) for x in "qkvo"}
        shapes |= {f"{layer}.mlp.{x}_proj": (32, 16) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (16, 32)}
        shapes |= {f"{layer}.{x}_layernorm": (16,) for x in ("input", "post_attention")}
    weights = {f"model.{k}.weight": np.full(v, 0.1, np.float32) for k, v in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_lines(file: Path, records: list[Any]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def make(mistake: Mistake, shared: Path, where: Path) -> None:
    """Write the mistake's files into an empty folder."""
    for file in shared.iterdir():
        (where / file.name).symlink_to(file)
    (where / "c.json").write_text(json.dumps(mistake.config))
    if mistake.script:
        (where / "mine.py").write_text(MINE)
        (where / "script.py").write_text(SCRIPT + mistake.script + "\n")
    for name, content in mistake.files.items():
        file = where / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif isinstance(content, str):
            file.write_text(content)
        elif isinstance(content, list):
            write_lines(file, content * 40)
        else:
            file.write_bytes((shared / content["copy"]).read_bytes())


def _command(shows: bool, words: Iterable[str]) -> list[str]:
    return [sys.executable, "-c", CHILD.format(shows=shows), *words]


def _environment(path: str) -> dict[str, str]:
    """For a child that chooses its own number of devices."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    more = {"PYTHONPATH": path, "COLUMNS": "100000", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    return kept | more


def made_in_child(mistake: Mistake, where: Path) -> Outcome:
    """Make the mistake in a process of its own, and measure it."""
    words = shlex.split(mistake.run)
    command = _command(mistake.within == "trace", words)
    if mistake.script:
        command = [sys.executable, "script.py"]
    path = os.pathsep.join([str(ROOT), "."] if mistake.script else [str(ROOT)])
    environment = _environment(path)
    with (where / "output").open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, cwd=where, env=environment)
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = used.ru_utime + used.ru_stime
    return Outcome(child.returncode, (where / "output").read_text(), seconds)


def made_here(mistake: Mistake, where: Path) -> Outcome:
    """Make the mistake in this process."""
    from jaxspeed.cli import main

    before, printed, paths = Path.cwd(), io.StringIO(), [*sys.path]
    sys.modules.pop("mine", None)
    os.chdir(where)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(shlex.split(mistake.run))
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os.chdir(before)
        sys.path[:] = paths
    return Outcome(code, printed.getvalue())


def faults(mistake: Mistake, outcome: Outcome) -> list[str]:
    """What is wrong with an outcome; an empty list if nothing is."""
    text = " ".join(outcome.text.split())
    said = outcome.message if mistake.code else text
    wrong = [f"does not say {word!r}" for word in mistake.says if word not in said]
    if outcome.code != mistake.code:
        wrong.append(f"exit code {outcome.code} instead of {mistake.code}")
    if "Traceback" in text and not mistake.script:
        wrong.append("a traceback")
    if mistake.within == "trace" and "compiling the step" in text:
        wrong.append("after a compilation")
    if outcome.seconds > SECONDS[mistake.within]:
        wrong.append(f"{outcome.seconds:.2f} s")
    return wrong


def made_together(within: str, shared: Path, where: Path) -> dict[str, list[str]]:
    """Make all mistakes of one kind in a process for all of them; what is wrong, by name."""
    code = f"from tests.cli.mistakes import together; together({within!r}, {str(shared)!r})"
    how: dict[str, Any] = {"cwd": where, "env": _environment(str(ROOT)), "text": True}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, **how)
    assert child.returncode == 0, child.stderr
    wrong: dict[str, list[str]] = json.loads(child.stdout.splitlines()[-1])
    return wrong


def together(within: str, shared: str) -> None:
    """Make mistakes in this process, each in a folder of its own; print what is wrong."""
    if within == "trace":
        from jaxspeed.metrics import start_lines

        start_lines.LASTS = 0
    wrong = dict[str, list[str]]()
    for number, mistake in enumerate(mistakes()):
        if mistake.within != within or mistake.script or "--devices gpu" in mistake.run:
            continue
        where = Path(str(number)).absolute()
        where.mkdir()
        make(mistake, Path(shared), where)
        outcome = made_here(mistake, where)
        problems = faults(mistake, outcome)
        imported = within == "flags" and {"jax", "flax"} & sys.modules.keys()
        problems += [f"imports {name}" for name in imported or ()]
        wrong |= {mistake.name: [*problems, outcome.text]} if problems else {}
    print(json.dumps(wrong))


def outcomes(chosen: Iterable[Mistake]) -> Iterator[tuple[Mistake, Outcome]]:
    """Make mistakes one after another, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "shared"
        shared.mkdir()
        shared_files(shared)
        for number, mistake in enumerate(chosen):
            where = Path(folder) / str(number)
            where.mkdir()
            make(mistake, shared, where)
            outcome = made_in_child(mistake, where)
            text = outcome.text.replace(f"{where}/", "").replace(str(where), ".")
            text = text.replace(f"{shared}/", "").replace(str(shared), ".")
            yield mistake, Outcome(outcome.code, text, outcome.seconds)


HEAD = """# Mistakes and their messages

128 mistakes of users of trainers, half of them from public trackers, and what `jaxspeed` says.
`python -m tests.cli.mistakes --write` writes the table from `tests/cli/mistakes.yaml`, and
`tests/cli/test_mistakes.py` holds that each message names what is wrong and what to write: in half
a second of CPU for flags and configs, in 3 s for files and data, and before a step is compiled for
all else.

| mistake | input | source | message |
|---|---|---|---|
"""


def row(mistake: Mistake, outcome: Outcome) -> str:
    """A row of the table."""
    message = outcome.message
    if not mistake.code:  # the row of its key
        message = message[message.index(mistake.says[0]) :]
    message = re.sub(r"^1 problem in [^:]*: - ", "", message)
    cells = (mistake.name, _cell(mistake.written, 160), mistake.source, _cell(message, 260))
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str, most: int) -> str:
    short = " ".join(text.split())
    short = short if len(short) <= most else short[: most - 4].rstrip() + " ..."
    return "`` " + short.replace("|", "\\|") + " ``" if short else ""


def report(arguments: list[str]) -> None:
    """Print the outcome of all mistakes, or of those that are named; write the table."""
    named = {word for word in arguments if word != "--write"}
    chosen = [m for m in mistakes() if not named or named & {m.name, m.within}]
    rows, count = HEAD, 0
    for mistake, outcome in outcomes(chosen):
        wrong = faults(mistake, outcome)
        count += bool(wrong)
        rows += row(mistake, outcome)
        line = f"{'NOT' if wrong else 'ok '} {mistake.name} [{mistake.within}]"
        print(f"{line} {outcome.seconds:.2f} s, code {outcome.code}")
        print(f"    {outcome.message[:700]}", *wrong, sep="\n    -> ", flush=True)
    print(f"{count} of {len(chosen)} with faults")
    if "--write" in arguments:
        TABLE.write_text(rows)


if __name__ == "__main__":
    report(sys.argv[1:])
