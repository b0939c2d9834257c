"""Tensor sharding of weights by layer specs and presets: all config keys for it, as one list."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from jaxspeed.config.patterns import pattern_problem
from jaxspeed.config.problems import Problem, from_pydantic
from jaxspeed.config.schema import Settings
from jaxspeed.config.tensor_section import ShardedLayer, TorchSpec
from jaxspeed.config.torch_names import example_pattern, looks_like_regex, path_patterns
from jaxspeed.config.types import Section
from jaxspeed.config.verdicts import shown
from jaxspeed.near_words import did_you_mean

# -- `tensor_parallel.preset_model`: sharding of the modules of a family ---------------------------

# By the names that a family's modules usually have, in Flax, in Hugging Face's code and here. What
# is fused into one weight (GPT-2's `c_attn`) is in no preset: contiguous shards of it would not
# shard its queries, keys and values alike. The projection that reads them stays replicated as well.
_QUERIES = ("q_proj", "query")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
_OUTPUTS = ("o_proj", "out_proj", "out")
_EMBEDDINGS = ("embed_tokens", "embed")
_HEADS = ("lm_head", "head")

Table = tuple[tuple[str, str, str | None], ...]  # (pattern, type, logical name of the dim)


def _table(columns: tuple[str, ...], rows: tuple[str, ...], vocabulary: tuple[str, ...]) -> Table:
    return (
        *((name, "column", None) for name in (*_QUERIES, *columns)),
        *((name, "column", "kv_heads") for name in _KEYS_AND_VALUES),
        *((name, "row", None) for name in (*_OUTPUTS, *rows)),
        *((name, "vocabulary", None) for name in vocabulary),
    )


PRESETS = MappingProxyType(
    {
        "gpt2": _table(
            ("**/mlp/c_fc", "fc1", "fc_in", "up_proj", "up"),
            ("**/mlp/c_proj", "fc2", "fc_out", "down_proj", "down"),
            ("wte", *_EMBEDDINGS, *_HEADS),
        ),
        "llama": _table(
            ("gate_proj", "up_proj", "gate", "up"),
            ("down_proj", "down"),
            (*_EMBEDDINGS, *_HEADS),
        ),
        "vit": _table(
            ("**/intermediate/dense", "fc1", "up_proj", "up"),
            ("**/output/dense", "fc2", "down_proj", "down"),
            (),
        ),
    }
)

# Families whose modules are named as those of another.
ALIASES = MappingProxyType(
    {
        "gpt3": "gpt2",
        "llama2": "llama",
        "llama3": "llama",
        "mistral": "llama",
        "qwen2": "llama",
    }
)

# Names that DeepSpeed knows, and why there is no preset for them.
_FUSED = "its attention or MLP is one fused weight, which presets cannot shard"
_EXPERTS = "its experts are sharded by mesh.expert, and the other layers by layer_specs"
UNBUILT = MappingProxyType(
    {
        "bloom": _FUSED,
        "chatglm": _FUSED,
        "phi3": _FUSED,
        "mixtral": _EXPERTS,
        "deepseek_v2": _EXPERTS,
    }
)


def canonical_preset(name: str) -> str | None:
    """Canonical name of a preset: GPT-2, gpt2 and gpt_2 are one."""
    plain = name.lower().translate(str.maketrans("", "", "-_ "))
    plain = ALIASES.get(plain, plain)
    return plain if plain in PRESETS else None


# -- layer specs -----------------------------------------------------------------------------------

SPECS = "tensor_parallel.partition_config.layer_specs"
PRESET = "tensor_parallel.preset_model"
FROM_TORCH = {"column": "column", "row": "row", "skip": "replicated"}
TORCH_DIM = {"column": 0, "row": 1}  # of a torch weight, [out, in]


@dataclass(frozen=True)
class TensorLayerSpec:
    """Sharding over `tensor` of the parameters that a pattern covers.

    `column` shards the outputs of a matmul, `row` the contracted dim, `vocabulary` the rows of an
    embedding or the columns of a head; `replicated` none.
    """

    pattern: str
    type: Literal["column", "row", "vocabulary", "replicated"]
    dim: int | None = None  # the sharded dim, if given
    logical_name: str | None = None  # of the sharded dim, if it has its own
    key: str = SPECS  # config key of the spec,
    text: str = ""  # and its text: one regex or preset may give several patterns

    @property
    def name(self) -> str:
        """Logical name of the dim, by which placement/rules.py shards it."""
        return self.logical_name or ("vocab" if self.type == "vocabulary" else "tensor")

    @property
    def written(self) -> str:
        """Text of the spec in the config."""
        return shown(self.text or self.pattern)

    @property
    def by_preset(self) -> bool:
        return self.key == PRESET


def layer_specs_from_keys(settings: Settings) -> tuple[tuple[TensorLayerSpec, ...], list[Problem]]:
    """Collect the specs in order of precedence, and the problems of their keys.

    As in DeepSpeed: those of partition_config first, then the preset's, unless use_default_specs
    is false.
    """
    section = settings.tensor_parallel
    partition = section.partition_config
    specs: list[TensorLayerSpec] = []
    problems: list[Problem] = []
    if partition is not None:
        entries = partition.layer_specs
        read = _from_mapping(entries) if isinstance(entries, dict) else _from_list(entries)
        for item in read:
            (problems if isinstance(item, Problem) else specs).append(item)  # type: ignore[arg-type]
    if section.preset_model is not None:
        preset = canonical_preset(section.preset_model)
        if preset is None:
            problems.append(_unknown_preset(section.preset_model))
        elif partition is None or partition.use_default_specs:
            specs += [
                TensorLayerSpec(pattern, type, None, name, PRESET, section.preset_model)  # type: ignore[arg-type]
                for pattern, type, name in PRESETS[preset]
            ]
    return tuple(specs), problems


def _from_mapping(types: Mapping[str, Any]) -> Iterator[TensorLayerSpec | Problem]:
    """Read {path pattern: type}, or {path pattern: {"type": type, "dim": k}}."""
    for pattern, value in types.items():
        path = f"{SPECS}.{pattern}"
        if wrong := _wrong_pattern(pattern):
            yield Problem(path, f"the pattern {shown(pattern)}", f"Needs {wrong}.")
            continue
        tree = value if isinstance(value, dict) else {"type": value}
        spec, problems = _checked(ShardedLayer, tree, path)
        if not isinstance(value, dict):
            problems = [replace(problem, path=path) for problem in problems]
        yield from problems
        if spec is None:
            continue
        if spec.type == "replicated" and spec.dim is not None:
            yield Problem(
                f"{path}.dim", str(spec.dim), "A replicated weight has no sharded dim: remove it."
            )
            continue
        yield TensorLayerSpec(pattern, spec.type, spec.dim)


def _wrong_pattern(pattern: str) -> str | None:
    if not looks_like_regex(pattern):
        return pattern_problem(pattern)
    patterns = path_patterns(pattern) or [example_pattern(pattern)]
    return f"a path pattern: {' and '.join(map(shown, patterns))}"


def _from_list(entries: Iterable[Any]) -> Iterator[TensorLayerSpec | Problem]:
    """Read DeepSpeed's form: [{"patterns": [regex, ...], "partition_type": type}]."""
    for number, item in enumerate(entries):
        path = f"{SPECS}.{number}"
        spec, problems = _checked(TorchSpec, item, path)
        problems += [] if spec is None else _only_in_torch(spec, path)
        yield from problems
        if spec is None or problems:
            continue
        for i, regex in enumerate(spec.patterns):
            key, patterns = f"{path}.patterns.{i}", _of_regex(regex)
            if isinstance(patterns, str):
                yield Problem(key, f"the regex {shown(regex)}", patterns)
                continue
            type_: Any = FROM_TORCH[spec.partition_type]
            yield from (
                TensorLayerSpec(pattern, type_, key=key, text=regex) for pattern in patterns
            )


def _of_regex(regex: str) -> list[str] | str:
    """Translate a regex to path patterns, or state what would work."""
    if "/" in regex and not looks_like_regex(regex):
        wrong = pattern_problem(regex)
        return [regex] if wrong is None else f"Needs {wrong}."
    patterns = path_patterns(regex)
    if patterns is not None:
        return patterns
    return (
        "It cannot be translated to path patterns. Write path patterns instead, such as "
        f'"{example_pattern(regex)}", where "*" matches within a name and "**" any number '
        "of names."
    )


def _only_in_torch(spec: TorchSpec, path: str) -> list[Problem]:
    """Problems of keys that apply only to torch's weights or DeepSpeed's storage of them."""
    problems = []
    flat = isinstance(spec.shape, list) and all(size == -1 for size in spec.shape)
    if spec.shape is not None and not flat:
        works = (
            "Contiguous shards of a fused weight do not have equal shares of its parts: give the "
            "model one weight each, and remove the key."
        )
        problems.append(Problem(f"{path}.shape", shown(spec.shape), works))
    if spec.partition_dim not in (None, TORCH_DIM.get(spec.partition_type, spec.partition_dim)):
        works = (
            f'It is a dim of a torch weight, of which "{spec.partition_type}" shards '
            f"{TORCH_DIM[spec.partition_type]}. Remove it, or write layer_specs as a mapping: in "
            '{"type": "column", "dim": 1}, dim is one of the JAX array.'
        )
        problems.append(Problem(f"{path}.partition_dim", str(spec.partition_dim), works))
    if spec.model_types is not None:
        works = "A config is for one model: keep its specs, and remove the key."
        problems.append(Problem(f"{path}.model_types", shown(spec.model_types), works))
    return problems


def _checked(model: type[Section], tree: Any, path: str) -> tuple[Any, list[Problem]]:
    try:
        return model.model_validate(tree), []
    except ValidationError as error:
        siblings = list(model.model_fields)
        problems = [
            replace(problem, path=problem.path.removesuffix("."))
            for item in error.errors()
            for problem in [from_pydantic(item, f"{path}.", siblings)]
        ]
        return None, list({problem.path: problem for problem in problems}.values())


def _unknown_preset(name: str) -> Problem:
    works = f"Needs one of {', '.join(PRESETS)}, or of {', '.join(ALIASES)}."
    why = UNBUILT.get(name.lower(), "")
    near = did_you_mean(name, [*PRESETS, *ALIASES])
    hint = f"There is none for {name.lower()}: {why}." if why else near
    rest = (
        f"Otherwise name the weights in {SPECS}, or set neither: then the model's logical axes "
        "apply, or the sharding is inferred from the traced program."
    )
    return Problem(PRESET, shown(name), " ".join(filter(None, (works, hint, rest))))
