"""`jaxspeed init`: write a commented config, from flags or by questions on a terminal."""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspeed.cli.common import command, out, print_json, program, refuse_unwritable
from jaxspeed.cli.recipe import (
    KINDS,
    RANK,
    Recipe,
    add_flags,
    completed,
    config_text,
    recipe_of,
    summary,
)
from jaxspeed.errors import ConfigError, JaxspeedError


def add(commands: Any) -> None:
    parser = command(
        commands,
        "init",
        "write a commented config, from flags or by questions on a terminal",
        "jaxspeed init config.yaml --model base --data chat.jsonl --lora 16",
        config=False,
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="config.yaml", help="default: %(default)s"
    )
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument(
        "--kind", choices=[*KINDS], help=f"{kinds}. By default what model and data show"
    )
    parser.add_argument("--output", metavar="DIR", help="the run's folder (run.output)")
    parser.add_argument("--force", action="store_true", help="replace FILE")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file = Path(args.file)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{file}: needs the name of a .yaml or .yml file")
    if file.exists() and not args.force:
        raise ConfigError(f"{file}: is there already; name another file, or add --force")
    refuse_unwritable("init", str(file))
    recipe = recipe_of(args)
    if recipe == Recipe(output=recipe.output) and sys.stdin.isatty() and not args.json:
        recipe = _asked(recipe)
    recipe, facts = completed(recipe)
    name = shlex.quote(str(file))
    steps = [f"{shlex.join(program())} {step} {name}" for step in ("data show", "plan", "train")]
    head = f"# {summary(recipe)}.\n" + "".join(f"#   {step}\n" for step in steps)
    file.write_text(head + config_text(recipe, facts), encoding="utf-8")
    if args.json:
        print_json({"file": str(file), **vars(recipe)})
        return 0
    console = out()
    console.print(f"{file}: {summary(recipe)}", highlight=False, markup=False)
    for step in steps:
        console.print(f"  {step}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _asked(recipe: Recipe) -> Recipe:
    """Ask for the facts of a recipe; an empty answer takes the value in brackets."""

    def answer(question: str, default: Any, read: Callable[[str], Any] = str) -> Any:
        while True:
            try:
                text = input(f"{question} [{default}]: ").strip() or str(default)
            except EOFError:
                raise KeyboardInterrupt from None
            try:
                return read(text)
            except ValueError:
                print(f"  {text!r}: not what is asked for", file=sys.stderr)

    def kind(text: str) -> Any:
        (name,) = [name for name in KINDS if name.startswith(text)]
        return name

    def positive(read: type) -> Callable[[str], Any]:
        def value(text: str) -> Any:
            number = read(text)
            if not number > 0:
                raise ValueError
            return number

        return value

    for name, what in KINDS.items():
        print(f"  {name:<12} {what}")
    recipe = replace(recipe, kind=answer("kind", "lora", kind))
    while True:
        none = "new" if recipe.kind == "pretrain" else "none"
        model = answer("the model's folder, or its id on the hub", recipe.model or none)
        data = answer("a file of data", recipe.data or "none")
        recipe = replace(recipe, model=None if model == none else model)
        recipe = replace(recipe, data=None if data == "none" else data)
        try:
            filled, _ = completed(recipe)
            break
        except JaxspeedError as error:
            print(f"  {error}", file=sys.stderr)
    if filled.rank:
        recipe = replace(recipe, rank=answer("rank of adapters", RANK, positive(int)))
    return replace(
        recipe,
        rate=answer("peak learning rate", f"{filled.rate:g}", positive(float)),
        epochs=answer("epochs", f"{filled.epochs:g}", positive(float)),
        batch=answer("samples a step", filled.batch, positive(int)),
        seq_len=answer("tokens a sample", filled.seq_len, positive(int)),
        output=answer("the run's folder", filled.output),
    )
