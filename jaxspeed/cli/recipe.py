"""A commented config from few facts: what `jaxspeed init` writes and `train --model` trains.

What a model's folder and the first record of the data show is read, not asked.
"""

import argparse
import glob
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxspeed.errors import ConfigError

Kind = Literal["pretrain", "finetune", "lora", "preferences"]
KINDS: dict[Kind, str] = {
    "pretrain": "a new small model, or a folder's, on text",
    "finetune": "all weights of a folder, on conversations or text",
    "lora": "adapters of a folder, on conversations or text",
    "preferences": "adapters of a folder, on pairs or labels (DPO, KTO)",
}
# Peak rates of all weights and of adapters, epochs, and samples a step.
RATES: dict[Kind, float] = {"pretrain": 1e-3, "finetune": 2e-5, "lora": 2e-4, "preferences": 1e-5}
EPOCHS, PREFERENCE_EPOCHS, BATCH, RANK, LONGEST = 3, 1, 16, 16, 2048
FLAGS = ("model", "data", "lora", "lr", "epochs", "batch_size", "seq_len")
FEW = 200  # records, each of which is then a sample
OBJECTIVES = {"preference": "dpo", "unpaired": "kto"}


@dataclass(frozen=True)
class Recipe:
    """Facts of a config; those that are None have the kind's defaults."""

    kind: Kind | None = None
    model: str | None = None
    data: str | None = None
    rank: int | None = None
    rate: float | None = None
    epochs: float | None = None
    batch: int | None = None
    seq_len: int | None = None
    output: str | None = None


@dataclass(frozen=True)
class Facts:
    """What the model and the data show."""

    context: int
    source: str = "stdlib"
    form: str | None = None  # of records: messages, ..., or preference, unpaired; None: text
    is_few: bool = False
    tokenizer: str | None = "bytes"  # None: the folder's
    has_template: bool = True


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a recipe."""
    rates = f"{RATES['lora']:g} of adapters, {RATES['finetune']:g} of all weights"
    preferences = f"{RATES['preferences']:g} of preferences"
    group = parser.add_argument_group("instead of a config")
    for flag, kind, metavar, text in (
        ("--model", str, "FOLDER", "a Hugging Face folder or the id of a model on the hub"),
        ("--data", str, "FILE", "conversations, pairs or texts: .jsonl, .json, .parquet, .txt"),
        (
            "--lora",
            int,
            "R",
            f"rank of adapters; by default all weights train, or {RANK} of preferences",
        ),
        ("--lr", float, "RATE", f"peak learning rate; by default {rates}, {preferences}"),
        ("--epochs", float, "N", f"by default {EPOCHS}; {PREFERENCE_EPOCHS} of preferences"),
        ("--batch-size", int, "N", f"samples a step; {BATCH} by default"),
        ("--seq-len", int, "N", f"tokens a sample; the model's by default, at most {LONGEST}"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe of a command's flags."""
    values = [getattr(args, flag) for flag in FLAGS]
    for flag, value in zip(FLAGS[2:], values[2:]):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} {value:g}: needs more than 0")
    return replace(Recipe(getattr(args, "kind", None), *values), output=args.output)


def completed(recipe: Recipe) -> tuple[Recipe, Facts]:
    """The recipe with all defaults, and what model and data show.

    Raises:
      JaxspeedError: a file cannot be read, or does not fit the kind.
    """
    facts = _facts(recipe)
    is_preference = facts.form in OBJECTIVES
    kind = recipe.kind or _kind(recipe, is_preference)
    if kind != "pretrain" and recipe.model is None:
        raise ConfigError(f"--model: missing. {kind} needs a Hugging Face folder")
    if kind != "pretrain" and recipe.data is None:
        raise ConfigError(f"--data: missing. {kind} needs a file")
    if is_preference != (kind == "preferences"):
        hold = f"preferences ({facts.form})" if is_preference else facts.form or "texts"
        raise ConfigError(
            f"--data {recipe.data}: holds {hold}, which {kind} does not read; "
            f"--kind {_kind(replace(recipe, kind=None), is_preference)} does"
        )
    rank = recipe.rank
    if rank is None and kind in ("lora", "preferences"):
        rank = RANK
    elif rank is not None and kind in ("pretrain", "finetune"):
        raise ConfigError(f"--lora {rank}: {kind} trains all weights; --kind lora has adapters")
    seq_len = recipe.seq_len or min(facts.context, LONGEST)
    if seq_len > facts.context:
        raise ConfigError(f"--seq-len {seq_len}: the model has {facts.context} positions")
    names = [Path(recipe.model or "new").expanduser().resolve().name]
    names += [] if recipe.data is None else [Path(recipe.data).name.partition(".")[0]]
    complete = replace(
        recipe,
        kind=kind,
        rank=rank,
        rate=recipe.rate or RATES[kind],
        epochs=recipe.epochs or (PREFERENCE_EPOCHS if kind == "preferences" else EPOCHS),
        batch=recipe.batch or BATCH,
        seq_len=seq_len,
        output=recipe.output or f"runs/{'-'.join([*names, kind])}",
    )
    return complete, facts


def _kind(recipe: Recipe, is_preference: bool) -> Kind:
    if is_preference:
        return "preferences"
    if recipe.model is None:
        return "pretrain"
    return "finetune" if recipe.rank is None else "lora"


def _facts(recipe: Recipe) -> Facts:
    # Before JAX is imported.
    if recipe.data is not None and not glob.glob(os.path.expanduser(recipe.data)):
        raise ConfigError(f"--data {recipe.data}: no such file (relative to {Path.cwd()})")
    is_folder = recipe.model is None or Path(recipe.model).expanduser().is_dir()
    if not is_folder and str(recipe.model).count("/") != 1:  # as in the id of a model on the hub
        raise ConfigError(f"--model {recipe.model}: no such folder (relative to {Path.cwd()})")
    facts = Facts(context=recipe.seq_len or 128)
    if recipe.model is not None:
        facts = _of_model(recipe.model, facts)
    return facts if recipe.data is None else _of_data(recipe.data, facts)


def _of_model(name: str, facts: Facts) -> Facts:
    from jaxspeed.config import load_config
    from jaxspeed.data.chat_template import MissingTemplateError, find_template
    from jaxspeed.data.model_limits import limits_of_run
    from jaxspeed.data.tokenizer import read_tokenizer, tokenizer_file
    from jaxspeed.interop.hf_folder import PretrainedFolder

    limits = limits_of_run(load_config({"model": {"pretrained": name}}))
    folder = PretrainedFolder(name).path
    if limits.sample != "tokens":
        raise ConfigError(f"--model {name}: is no language model; write a config (docs/config.md)")
    context = limits.seq_len or LONGEST
    if tokenizer_file(folder) is None:
        if limits.vocab_size != 256:
            raise ConfigError(
                f"--model {name}: has no tokenizer.json or tokenizer.model; copy the model's there"
            )
        return replace(facts, context=context)
    try:
        find_template(read_tokenizer(folder), None, {}, today=None)
    except MissingTemplateError:
        facts = replace(facts, has_template=False)
    return replace(facts, context=context, tokenizer=None)


def _of_data(path: str, facts: Facts) -> Facts:
    from jaxspeed.config.run_sections import SourceSection
    from jaxspeed.data.chat_formats import FIELDS, format_of
    from jaxspeed.data.open_source import by_file, fields_of_records
    from jaxspeed.data.preference_records import preference_format

    files = [*by_file(SourceSection(path=path)).values()]
    kinds = {file.source for file in files}
    kind = kinds.pop() or "text"
    if kinds or kind not in ("text", "jsonl", "json", "parquet", "arrow", "tokens"):
        raise ConfigError(f"--data {path}: needs files of one kind: records, texts or tokens")
    if kind in ("text", "tokens"):
        return replace(facts, source=kind)
    records = [*itertools.islice(fields_of_records(files), FEW)]
    names = records[0] if records else []
    form = preference_format(names) or format_of(names)
    if form is None and "text" not in names:
        forms = "; ".join(" and ".join(fields) for fields in FIELDS.values())
        raise ConfigError(
            f"--data {path}: records have the fields {', '.join(map(str, names)) or 'none'}; needs "
            f"text, or those of conversations ({forms}), or chosen and rejected"
        )
    return replace(facts, source=kind, form=None if "text" in names else form,
                   is_few=len(records) < FEW)  # fmt: skip


def summary(recipe: Recipe) -> str:
    """What a run of flags does, in a line that names them."""
    epochs = f"{recipe.epochs:g} epoch{'s' * (recipe.epochs != 1)}"
    what = f"adapters of rank {recipe.rank}" if recipe.rank else "all weights"
    return (
        f"{recipe.kind}: {what}, rate {recipe.rate:g} (--lr), {epochs} (--epochs), "
        f"{recipe.batch} samples a step (--batch-size), of {recipe.seq_len} tokens (--seq-len)"
    )


def config_text(recipe: Recipe, facts: Facts) -> str:
    """The config of a complete recipe, as commented YAML."""
    return "\n".join(_lines(recipe, facts)) + "\n"


_NEW_MODEL = """model:                    # `jaxspeed report --models` lists families and presets
  family: llama
  config:
    hidden_size: 256
    intermediate_size: 768
    num_hidden_layers: 6
    num_attention_heads: 8
    num_key_value_heads: 4
    vocab_size: 256
    max_position_embeddings: {context}
    tie_word_embeddings: true"""


def _lines(recipe: Recipe, facts: Facts) -> Iterator[str]:
    def row(text: str, comment: str) -> str:
        return f"{text:<25} # {comment}"

    def number(value: float | None) -> str:
        """A number that YAML 1.1 reads as one, too, which needs a dot."""
        text = f"{value:g}"
        return text if "e" not in text or "." in text else text.replace("e", ".0e")

    quoted = json.dumps
    yield f"# {recipe.kind}: {KINDS[recipe.kind or 'pretrain']}."
    yield "run:"
    yield row(f"  epochs: {number(recipe.epochs)}", "or steps")
    yield f"  output: {quoted(recipe.output)}"
    yield f"  sample_prompt: {quoted('Hello!' if facts.form else 'The ')}"
    yield ""
    if recipe.model is None:
        yield _NEW_MODEL.format(context=recipe.seq_len)
    else:
        yield "model:"
        yield f"  pretrained: {quoted(recipe.model)}"
        if recipe.rank:
            yield row("  # quantize: {weights: nf4}", "the frozen weights in 4 bits")
    yield ""
    if recipe.rank:
        yield "lora:"
        yield f"  r: {recipe.rank}"
        yield row(f"  lora_alpha: {2 * recipe.rank}", "adapters are scaled by lora_alpha / r")
        yield "  target_modules: all-linear"
        yield ""
    if recipe.kind == "preferences":
        yield "objective:"
        yield f"  type: {OBJECTIVES[facts.form or '']}"
        yield row("  beta: 0.1", "how much a policy may move from the reference")
        yield ""
    yield "data:"
    yield f"  source: {facts.source}"
    if recipe.data is not None:
        yield f"  path: {quoted(recipe.data)}"
    yield row(f"  seq_len: {recipe.seq_len}", "tokens a sample")
    if facts.tokenizer is not None:
        yield row(f"  tokenizer: {facts.tokenizer}", "or bpe, or the path of a tokenizer.json")
    if facts.form and facts.form != "prompt_completion" and not facts.has_template:
        yield row("  chat_template: chatml", "the folder has none")
    if facts.form and recipe.kind != "preferences":
        trains = "everything" if recipe.kind == "pretrain" else "assistant"
        yield row(f"  train_on: {trains}", "assistant, last_turn or everything")
    if facts.is_few and facts.form:
        yield row("  packing: false", "few records: each is a sample")
    share = 0 if facts.is_few else 0.05
    yield row(f"  held_out: {share:g}", "the share for evaluation; or a source in data.eval")
    yield ""
    yield f"train_batch_size: {recipe.batch}"
    yield row("train_micro_batch_size_per_gpu: 1", "more is faster while it fits: jaxspeed plan")
    yield "gradient_clipping: 1.0"
    yield "bf16: {enabled: true}"
    yield ""
    yield "optimizer:"
    yield "  type: AdamW"
    decay = 0.1 if recipe.model is None else 0.0
    yield f"  params: {{lr: {number(recipe.rate)}, weight_decay: {decay}}}"
    yield "scheduler:"
    yield "  type: WarmupCosineLR"
    yield "  params:"
    yield row("    total_num_steps: auto", "those of the run")
    yield f"    warmup_num_steps: {20 if recipe.model is None else 2}"
    yield "    warmup_type: linear"
    yield ""
    yield row("parallel: {remat: full}", "activations are recomputed: less memory")
    yield row("zero_optimization: {stage: 3}", "all state is sharded over the devices")
