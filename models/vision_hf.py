"""Towers and models with images in Hugging Face's format: what their families have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from . import MODEL_TYPES, hf_form, vision
from .decoder_hf import norm_rules
from .gemma_hf import LANGUAGE_MODELS
from .vision_language import text_form

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
BUCKETED = ("smolvlm_vision", "idefics3_vision")
# The fields that a published text_config lacks where they have these values.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "gemma3_text": LANGUAGE_MODELS["gemma3"],
}

# -- config.json -----------------------------------------------------------------------------------


def tower_fields(kind: str) -> tuple[Field | Fixed, ...]:
    """The fields of a tower's config of a model type, with their defaults."""
    clip = kind == CLIP
    defaults = (768, 3072, 12, 12, 224, 32 if clip else 16, 3)
    defaults = (1152, 3072, 12, 16, 224, 32, 3) if kind in BUCKETED else defaults
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("image_size", "patch_size", "num_channels"),
    )
    return (
        *(Field(name, name, int, default) for name, default in zip(names, defaults)),
        Field("layer_norm_eps", "layer_norm_eps", float, 1e-5 if clip else 1e-6),
        Field("initializer_range", "initializer_range", float, 0.02),
        Field("hidden_act", "activation", str, "quick_gelu" if clip else "gelu_pytorch_tanh"),
    )


def read_tower(values: Mapping[str, Any], kinds: Sequence[str]) -> vision.Config:
    """The config of the tower in `vision_config`, of one of these model types, the first's if none.

    Raises:
      PretrainedError: it is of another type.
    """
    tower = dict(values.get("vision_config") or {})
    kind = tower.get("model_type", kinds[0])
    if kind not in kinds:
        raise PretrainedError(
            f"config.json: vision_config has model_type {kind!r}; {' or '.join(kinds)} is supported"
        )
    fields = read_fields(tower, tower_fields(kind), "config.json: vision_config")
    return vision.Config(**fields, is_clip=kind == CLIP, is_bucketed=kind in BUCKETED)


def write_tower(config: vision.Config) -> dict[str, Any]:
    """`vision_config`."""
    kind = CLIP if config.is_clip else BUCKETED[0] if config.is_bucketed else SIGLIP
    more = {"vision_use_head": False} if kind == SIGLIP else {}
    return {"model_type": kind, **write_fields(config, tower_fields(kind)), **more}


def read_text(values: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    """The config of the language model in `text_config`, of one of these model types.

    Raises:
      PretrainedError: it is of another type.
    """
    if not isinstance(values.get("text_config"), Mapping):
        raise PretrainedError("config.json: has no text_config")
    text = dict(values["text_config"])
    kind = text.setdefault("model_type", kinds[0])
    if kind not in kinds:
        raise PretrainedError(
            f"config.json: text_config has model_type {kind!r}; {', '.join(kinds)} are supported"
        )
    shared = {n: values[n] for n in ("tie_word_embeddings",) if n in values}
    return hf_form(MODEL_TYPES[kind]).read_config(TEXT_DEFAULTS.get(kind, {}) | text | shared)


def write_text(config: Any) -> dict[str, Any]:
    """`text_config`."""
    form = hf_form(type(config).__module__.rpartition(".")[2])
    values = form.write_config(config)
    return {"architectures": [form.MODEL_TYPES[values["model_type"]]], **values}


# -- mapping rules ---------------------------------------------------------------------------------


class Names(NamedTuple):
    """Beginnings of the names of a model's tensors, in one of the forms that files have."""

    tower: str
    projector: str
    body: str  # of the language model
    head: str
    end: str = ""  # of a tensor's name that only files of this form have


_LAST = "embeddings.patch_embedding.weight"
# Of published files; as transformers 5 writes them; in its memory; in that of 4.52 and later.
PUBLISHED, WRITTEN, IN_MEMORY, OLD_MEMORY = (
    Names(
        f"{before}vision_tower.{inner}",
        f"{before}multi_modal_projector",
        "model.language_model." if before else "language_model.model.",
        "lm_head." if before else "language_model.lm_head.",
        f"{before}vision_tower.{inner}{_LAST}",
    )
    for before, inner in (
        ("", "vision_model."),
        ("", ""),
        ("model.", ""),
        ("model.", "vision_model."),
    )
)
Make = Callable[[Any, Names], MappingTable]


def all_tables(make: Make) -> tuple[Callable[[Any], MappingTable], dict[str, Any]]:
    """The table of published files, and by the ends of tensors' names those of other files.

    All have that of the names in memory, as adapters do.
    """

    def of(names: Names) -> Callable[[Any], MappingTable]:
        def table(config: Any) -> MappingTable:
            memory = None if names is IN_MEMORY else make(config, IN_MEMORY)
            return dataclasses.replace(make(config, names), memory=memory)

        return table

    return of(PUBLISHED), {names.end: of(names) for names in (WRITTEN, IN_MEMORY, OLD_MEMORY)}


def composed(
    config: Any, names: Names, tower: MappingTable, projector: Sequence[TensorRule]
) -> MappingTable:
    """The table of a tower, a projector and a language model."""
    text = text_form(config.text).table(config.text)
    language = within(text, {"model.": names.body, "lm_head.": names.head})
    return joined(tower, MappingTable(projector), language)


def within(table: MappingTable, names: Mapping[str, str], path: str = "language") -> MappingTable:
    """The table of a language model that is a part of another, at `path`.

    Args:
      names: beginnings of tensors' names alone, and in the other model.
    """

    def renamed(name: str) -> str:
        begin = next(begin for begin in names if name.startswith(begin))
        return names[begin] + name.removeprefix(begin)

    def moved(rule: TensorRule) -> TensorRule:
        paths = (rule.paths,) if isinstance(rule.paths, str) else rule.paths
        at = tuple(f"{path}/{own}" for own in paths)
        return dataclasses.replace(
            rule, tensor=renamed(rule.tensor), paths=at[0] if len(at) == 1 else at
        )

    return dataclasses.replace(
        table,
        rules=[*map(moved, table.rules)],
        ignored=[*map(renamed, table.ignored)],
        prefix="",
        tied={renamed(name): renamed(other) for name, other in table.tied.items()},
        variables=[f"{path}/{own}" for own in table.variables],
    )


def joined(*tables: MappingTable) -> MappingTable:
    """One table of several parts."""
    return MappingTable(
        [rule for table in tables for rule in table.rules],
        ignored=[name for table in tables for name in table.ignored],
        tied={name: other for table in tables for name, other in table.tied.items()},
        modules={name: other for table in tables for name, other in table.modules.items()},
        variables=[path for table in tables for path in table.variables],
        unread=[module for table in tables for module in table.unread],
    )


def linear_rules(theirs: str, ours: str) -> list[TensorRule]:
    """The rules of a linear layer, with a bias or without."""
    return [
        TensorRule(f"{theirs}.weight", f"{ours}/kernel", "out in -> in out"),
        TensorRule(f"{theirs}.bias", f"{ours}/bias"),
    ]


_POOLING = (
    *("probe", "attention.in_proj_weight", "attention.in_proj_bias"),
    *(
        f"{module}.{name}"
        for module in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
        for name in ("weight", "bias")
    ),
)
_HEADS = "(heads dim) embed -> layer embed heads dim"
_IN_BLOCKS = {  # module: (ours, layout of the weight, that of the bias)
    **{
        f"self_attn.{name}": (f"attn/{name}/kernel", _HEADS, "(heads dim) -> layer heads dim")
        for name in ("q_proj", "k_proj", "v_proj")
    },
    "self_attn.out_proj": (
        "attn/o_proj/kernel",
        "embed (heads dim) -> layer heads dim embed",
        "",
    ),
    "mlp.fc1": ("mlp/up/kernel", "out in -> layer in out", ""),
    "mlp.fc2": ("mlp/down/kernel", "out in -> layer in out", ""),
    "layer_norm1": ("attn_norm/scale", "", ""),
    "layer_norm2": ("mlp_norm/scale", "", ""),
}


def tower_table(
    config: vision.Config, theirs: str, *, layers: int | None = None, last_norm: bool = True
) -> MappingTable:
    """The table of a tower; `layers` and `last_norm` as of `vision.Tower`.

    Args:
      theirs: the beginning of its tensors' names.
    """
    window = {"row": config.patch_size, "column": config.patch_size}
    rules = [
        TensorRule(
            f"{theirs}embeddings.patch_embedding.weight",
            "tower/patches/kernel",
            "embed channel row column -> (row column channel) embed",
            window,
        ),
        TensorRule(f"{theirs}embeddings.patch_embedding.bias", "tower/patches/bias"),
        TensorRule(f"{theirs}embeddings.class_embedding", "tower/class_token"),
        TensorRule(
            f"{theirs}embeddings.position_embedding.weight", "tower/positions", kind="embedding"
        ),
        *norm_rules(f"{theirs}pre_layrnorm", "tower/first_norm"),
        *_blocks(f"{theirs}encoder.layers.{{layer}}", "tower/blocks", 0),
    ]
    of_unread: list[TensorRule] = []
    layers = config.num_hidden_layers if layers is None else layers
    if layers < config.num_hidden_layers:
        of_unread += _blocks(f"{theirs}encoder.layers.{{layer}}", "tower/further", layers)
    last = norm_rules(f"{theirs}post_layernorm", "tower/norm")
    of_unread += [] if last_norm else last
    rules += last if last_norm else []
    # A buffer of old files, and SigLIP's pooling, which these models do not have.
    ignored = [f"{theirs}embeddings.position_ids", *(f"{theirs}head.{name}" for name in _POOLING)]
    return MappingTable(
        [*rules, *of_unread],
        ignored=ignored,
        variables=[str(rule.paths) for rule in of_unread],
        unread=[
            f"{theirs}encoder.layers.{layer}.{module}"
            for layer in range(layers, config.num_hidden_layers)
            for module in _IN_BLOCKS
        ],
    )


def _blocks(theirs: str, ours: str, first: int) -> list[TensorRule]:
    start = {"layer": first}
    rules = []
    for name, (path, weight, bias) in _IN_BLOCKS.items():
        at, other = f"{ours}/{path}", f"{ours}/{path.rpartition('/')[0]}/bias"
        rules.append(TensorRule(f"{theirs}.{name}.weight", at, weight, first=start))
        rules.append(TensorRule(f"{theirs}.{name}.bias", other, bias, first=start))
    return rules
