"""`jaxspeed sample CONFIG`: generate text from a checkpoint, or chat with its model."""

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from jaxspeed.cli.common import IMPORTS, add_checkpoint, command, loaded, print_json, shown
from jaxspeed.cli.eval import config_of_folder
from jaxspeed.errors import ConfigError

PROMPT, TOKENS, TEMPERATURE = "def ", 200, 0.8  # of the schema, which help does not import


def add(commands: Any) -> None:
    parser = command(
        commands,
        "sample",
        "generate text from a run's checkpoint",
        "jaxspeed sample configs/tiny.yaml --prompt 'import ' --tokens 100",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        help=f"start of a text (overrides run.sample_prompt, {PROMPT!r} by default); may be "
        "repeated, for a batch",
    )
    parser.add_argument(
        "--chat",
        metavar="TEXT",
        nargs="?",
        const="",
        help="a message to the model, by its chat template; without a text, each line of the "
        "standard input is one",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="an image of the first message of --chat, whose text may be empty; may be repeated",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"number of tokens (overrides run.sample_tokens, {TOKENS} by default)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help=f"0 always takes the most likely token (overrides "
        f"run.sample_temperature, {TEMPERATURE} by default)",
    )
    parser.add_argument(
        "--top-k", type=int, help="draw from the k most likely tokens; by default from all"
    )
    parser.add_argument(
        "--top-p",
        type=_share,
        help="draw from the fewest tokens of this probability together (1 by default)",
    )
    parser.add_argument(
        "--min-p",
        type=_share,
        help="draw from tokens of this share of the largest probability (0 by default)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        help="above 1: tokens seen before become less likely (1 by default)",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    add_checkpoint(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, value in (
        ("sample_tokens", args.tokens),
        ("sample_temperature", args.temperature),
    ):
        if value is not None:
            args.overrides.append(f"run.{name}={json.dumps(value)}")
    if args.chat is not None and args.prompt:
        raise ConfigError("--chat: set together with --prompt; a prompt is continued as it is")
    if args.chat is None and args.system is not None:
        raise ConfigError("--system: only --chat has a system message")
    if args.chat is None and args.image:
        raise ConfigError("--image: only a message of --chat has images")
    args.config = config_of_folder(args.config)
    config = loaded(args)
    if args.chat is not None:
        return _chat(args, config)
    with shown(IMPORTS):
        from jaxspeed.checkpoint.process_agreement import is_first
        from jaxspeed.generation import Request, Sampling
        from jaxspeed.run import sample_run, source_of

    rules = {name: getattr(args, name) for name in RULES}
    prompts = args.prompt or [config.run.sample_prompt]
    sampling = Sampling(config.run.sample_temperature, **rules)
    Request(prompts, sampling=sampling, stop=args.stop, seed=args.seed)  # refused at once
    options = {**rules, "stop": args.stop, "seed": args.seed}
    with shown("reading the model"):
        source = source_of(config, name=str(args.config))
        pieces = sample_run(source, args.tag, prompts, ema=args.ema, **options)
    if not is_first():  # each process computes the same text
        for _ in pieces:
            pass
    elif args.json:
        texts = collected(pieces, len(prompts))
        print_json({"text": texts[0]} if len(texts) == 1 else {"texts": texts})
    elif len(prompts) == 1:
        for _, text in pieces:
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
    else:
        for number, text in enumerate(collected(pieces, len(prompts)), 1):
            sys.stdout.write(f"--- {number} ---\n{text}\n")
    return 0


def _chat(args: argparse.Namespace, config: Any) -> int:
    """Answer one message, or each line of the standard input."""
    with shown(IMPORTS):
        from jaxspeed.checkpoint.process_agreement import is_first
        from jaxspeed.run import chat_run, source_of

    rules = {name: getattr(args, name) for name in RULES}
    options = {**rules, "stop": args.stop, "seed": args.seed, "system": args.system}
    source = source_of(config, name=str(args.config))
    import jax

    if not args.chat and not args.image and jax.process_count() > 1:
        raise ConfigError("--chat: several processes need a text, since one alone reads the input")
    with shown("reading the model"):
        chat = chat_run(source, args.tag, ema=args.ema, **options)
    shows = is_first() and not args.json
    images = args.image
    for text in [args.chat] if args.chat or images else _lines():
        pieces, images = chat.reply(text, images), []
        for piece in pieces:
            if shows:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if shows:
            sys.stdout.write("\n")
    if args.json and is_first():
        print_json({"messages": chat.messages})
    return 0


def _lines() -> Iterator[str]:
    """Lines of the standard input that are not blank, with a prompt on a terminal."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # with it, `input` edits lines
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> ").strip():
                yield line


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: needs a number from 0 to 1")
    return value


RULES = ("top_k", "top_p", "min_p", "repetition_penalty")


def collected(pieces: Iterable[tuple[int, str]], count: int) -> list[str]:
    """The text of each prompt."""
    texts = [""] * count
    for number, text in pieces:
        texts[number] += text
    return texts
