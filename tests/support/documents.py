"""README and docs as data: fenced blocks, code spans, and what commands and programs print.

`python -m tests.support.documents [FILE ...]` runs the command of each output block (`<!-- output
of: COMMAND -->`) and rewrites the block, and each table of keys (`<!-- keys of: SECTION -->`) or of
public names (`<!-- names of: MODULE -->`, or some of a module's), and that of objectives.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

from jaxspeed.config import Config
from jaxspeed.config.objective_keys import OBJECTIVES, objective_class
from jaxspeed.config.tree import VOCABULARY, read, section_at
from jaxspeed.config.verdicts import shown

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "notes").glob("*.md"))]
FENCED = re.compile(r"^(<!-- [^\n]* -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
OUTPUT = re.compile(r"<!-- output of: (.*) -->")
KEYS = re.compile(r"<!-- keys of: (\w+) -->\n((?:\|.*\n)+)")
PUBLIC_NAMES = re.compile(r"<!-- names of: ([\w.]+)(?:: ([\w ]+))? -->\n((?:\|.*\n)*)")
OBJECTIVES_OF_FAMILIES = re.compile(r"<!-- objectives of families -->\n((?:\|.*\n)*)")
README_EXAMPLE = "the example of README.md with the line above"


@dataclass(frozen=True)
class Block:
    """A fenced block; `marker` is the comment in the line before it."""

    language: str
    text: str
    marker: str = ""


@dataclass(frozen=True)
class Shown:
    """An output block, and the shell command or else the Python program that prints it."""

    command: str
    program: str
    output: str


def blocks(page: str) -> list[Block]:
    return [Block(m[2], m[3], (m[1] or "").strip()) for m in FENCED.finditer(page)]


def prose(page: str) -> str:
    return FENCED.sub("", page)


def spans(page: str) -> list[str]:
    """Inline code, as it is read: a pipe in a table is escaped, a line may be broken."""
    found = re.findall(r"`([^`]+)`", prose(page))
    return [" ".join(span.replace("\\|", "|").split()) for span in found]


def shell_commands(block: str) -> list[str]:
    """The commands of a shell block, each on one line and without its comment."""
    lines = block.replace("\\\n", " ").splitlines()
    bare = (re.sub(r"(^|\s)#\s.*", "", line) for line in lines)
    return [" ".join(c.split()) for line in bare for c in line.split(" && ") if c.strip()]


def example(page: str) -> str:
    """The first Python program of a page."""
    return next(block.text for block in blocks(page) if block.language == "python")


def shown_outputs(page: Path) -> list[Shown]:
    """The output blocks of a page, in order."""
    found, shell, program = [], "", ""
    for block in blocks(page.read_text()):
        marked = OUTPUT.match(block.marker)
        if block.language == "sh":
            shell = shell_commands(block.text)[-1]
        elif block.language == "python":
            program = block.text
        elif marked and marked[1] == "the example above":
            found.append(Shown("", program, block.text))
        elif marked and marked[1] == README_EXAMPLE:
            # Without what the README's example prints itself.
            before = re.sub(r"^print\(.*\)$", "", example(PAGES[0].read_text()), flags=re.M)
            found.append(Shown("", before + program, block.text))
        elif marked:
            found.append(Shown(marked[1].replace("the command above", shell), "", block.text))
    return found


def key_table(section: str) -> str:
    """The table of a section's keys, from their declarations."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    of_section = section_at(section)
    assert of_section is not None
    for path, key in VOCABULARY.items():
        if path.startswith(f"{section}."):
            field = of_section.model_fields.get(path.removeprefix(f"{section}."))
            # A section that a config need not have has no values in an empty one.
            is_absent = read(Config(), section) is None and field is not None
            default = field.default if is_absent else read(Config(), path)
            default = shown(default).replace("'", '"')
            verdict = "" if key.verdict == "honoured" else f"{key.verdict}: "
            meaning = (verdict + key.sentence).replace("*", "\\*")
            lines.append(f"| `{path.removeprefix(f'{section}.')}` | `{default}` | {meaning} |")
    return "".join(f"{line}\n" for line in lines)


def name_table(module: str, names: str | None = None) -> str:
    """The table of a module's public names, with the first sentence of each docstring."""
    of_module = importlib.import_module(module)
    lines = ["| name | |", "|---|---|"]
    for name in names.split() if names else of_module.__all__:
        value = getattr(of_module, name)
        summary = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        if isinstance(value, types.UnionType):
            summary = "One of " + ", ".join(f"`{each.__name__}`" for each in value.__args__) + "."
        escaped = re.sub(r"([|*<])", r"\\\1", summary)
        lines.append(f"| `{name}` | {escaped} |")
    return "".join(f"{line}\n" for line in lines)


def objective_table() -> str:
    """The table of the families' objectives: loss, and arrays of a batch."""
    lines = ["| `type` | loss | arrays of a batch |", "|---|---|---|"]
    for name in OBJECTIVES:
        kind = objective_class(name)
        arrays = "<br>".join(f"`{array}`: {meaning}" for array, meaning in kind.arrays.items())
        lines.append(f"| `{name}` | {inspect.getdoc(kind)} | {arrays} |")
    return "".join(f"{line}\n" for line in lines)


def prepare(folder: Path) -> Path:
    """A folder with the configs of this repository, and with a config of the reader's own."""
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
        config = next(b.text for b in blocks(PAGES[0].read_text()) if b.language == "json")
        for name in ("ds_config.json", "config.json", "config.yaml"):
            (folder / name).write_text(config)
    return folder


def printed(command: str, program: str, folder: Path) -> str:
    """What a command or a program prints in a folder.

    But for the compile time, which is not printed where a cache has the program.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_P", "XLA_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    child = subprocess.run(
        ["bash", "-c", command] if command else [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=prepare(folder),
        env={**kept, "COLUMNS": "100", "PATH": path, "XDG_CACHE_HOME": str(folder)},
    )
    if child.returncode and "2>&1" not in command:  # that one shows an error
        raise RuntimeError(child.stderr)
    lines = child.stdout.strip("\n").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if not line.startswith(" compile time"))


def masked(output: str) -> list[str]:
    """The words of an output without numbers, paths, order and line breaks: the machine's."""
    numbers = re.sub(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", "#", output)
    return sorted(re.sub(r"\w+(?:/[\w#]+)+", "PATH", numbers).split())


def main(pages: list[Path]) -> None:
    """Rewrite the tables of keys, names and objectives, and the output blocks of the pages."""
    for page in pages:
        text = KEYS.sub(lambda m: m[0].replace(m[2], key_table(m[1])), page.read_text())
        text = PUBLIC_NAMES.sub(
            lambda m: f"{m[0].partition(chr(10))[0]}\n{name_table(m[1], m[2])}", text
        )
        text = OBJECTIVES_OF_FAMILIES.sub(lambda m: m[0].replace(m[1], objective_table()), text)
        page.write_text(text)
        for block in shown_outputs(page):
            print(page.name, block.command or "a Python program", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                new = printed(block.command, block.program, Path(folder))
            text = page.read_text()
            assert new and text.count(f"\n{block.output}```") == 1, f"printed: {new!r}"
            page.write_text(text.replace(f"\n{block.output}```", f"\n{new}```"))


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or PAGES)
