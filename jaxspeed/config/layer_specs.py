"""How the tensor axis shards which weights: every key of a config for it, as one list."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from jaxspeed.config.patterns import pattern_problem
from jaxspeed.config.problems import Problem, did_you_mean, from_pydantic
from jaxspeed.config.schema import Settings
from jaxspeed.config.tensor_section import TorchSpec, WordAt
from jaxspeed.config.torch_names import example_pattern, looks_like_regex, path_patterns
from jaxspeed.config.types import Section
from jaxspeed.config.verdicts import shown

# -- `tensor_parallel.preset_model`: which modules of a family are sharded how ---------------------

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

# Families whose modules have the names of another.
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
_FUSED = "its attention, or its MLP, is one fused weight, and presets cut none of those"
_EXPERTS = "the expert axis is not built"
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
    """The preset that a user means: GPT-2, gpt2 and gpt_2 are one."""
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
    """How the parameters that a pattern covers are cut over the tensor axis.

    `column` cuts what a product makes, `row` what it sums over, `vocabulary` the rows of an
    embedding or the columns of a head; `replicated` keeps them whole.
    """

    pattern: str
    type: Literal["column", "row", "vocabulary", "replicated"]
    dim: int | None = None  # the dim that is cut, where it was said
    logical_name: str | None = None  # of the dim that is cut, where it has one of its own
    key: str = SPECS  # where in the config it stands,
    text: str = ""  # and as what: several patterns may come of one regex or preset

    @property
    def name(self) -> str:
        """The logical name that the dim gets, by which placement/rules.py cuts it."""
        return self.logical_name or ("vocab" if self.type == "vocabulary" else "tensor")

    @property
    def written(self) -> str:
        """As the user wrote it."""
        return shown(self.text or self.pattern)

    @property
    def by_preset(self) -> bool:
        return self.key == PRESET


def layer_specs_from_keys(settings: Settings) -> tuple[tuple[TensorLayerSpec, ...], list[Problem]]:
    """The specs in the order in which they win, and what is wrong with the words for them.

    As in DeepSpeed: those of partition_config first, then the preset's, unless use_default_specs
    is false.
    """
    words = settings.tensor_parallel
    partition = words.partition_config
    specs: list[TensorLayerSpec] = []
    problems: list[Problem] = []
    if partition is not None:
        given = partition.layer_specs
        read = _from_mapping(given) if isinstance(given, dict) else _from_list(given)
        for item in read:
            (problems if isinstance(item, Problem) else specs).append(item)  # type: ignore[arg-type]
    if words.preset_model is not None:
        preset = canonical_preset(words.preset_model)
        if preset is None:
            problems.append(_unknown_preset(words.preset_model))
        elif partition is None or partition.use_default_specs:
            specs += [
                TensorLayerSpec(pattern, type, None, name, PRESET, words.preset_model)  # type: ignore[arg-type]
                for pattern, type, name in PRESETS[preset]
            ]
    return tuple(specs), problems


def _from_mapping(given: Mapping[str, Any]) -> Iterator[TensorLayerSpec | Problem]:
    """{path pattern: word}, or {path pattern: {"type": word, "dim": k}}."""
    for pattern, value in given.items():
        path = f"{SPECS}.{pattern}"
        if wrong := _wrong_pattern(pattern):
            yield Problem(path, f"the pattern {shown(pattern)}", f"Needs {wrong}.")
            continue
        tree = value if isinstance(value, dict) else {"type": value}
        word, problems = _checked(WordAt, tree, path)
        if not isinstance(value, dict):
            problems = [replace(problem, path=path) for problem in problems]
        yield from problems
        if word is None:
            continue
        if word.type == "replicated" and word.dim is not None:
            yield Problem(
                f"{path}.dim", str(word.dim), "What is replicated has no dim that is cut."
            )
            continue
        yield TensorLayerSpec(pattern, word.type, word.dim)


def _wrong_pattern(pattern: str) -> str | None:
    if not looks_like_regex(pattern):
        return pattern_problem(pattern)
    patterns = path_patterns(pattern) or [example_pattern(pattern)]
    return f"a path pattern: {' and '.join(map(shown, patterns))}"


def _from_list(given: Iterable[Any]) -> Iterator[TensorLayerSpec | Problem]:
    """DeepSpeed's form: [{"patterns": [regex, ...], "partition_type": word}]."""
    for number, item in enumerate(given):
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
            word: Any = FROM_TORCH[spec.partition_type]
            yield from (TensorLayerSpec(pattern, word, key=key, text=regex) for pattern in patterns)


def _of_regex(regex: str) -> list[str] | str:
    """The path patterns that a regex comes to, or what would work."""
    if "/" in regex and not looks_like_regex(regex):
        wrong = pattern_problem(regex)
        return [regex] if wrong is None else f"Needs {wrong}."
    patterns = path_patterns(regex)
    if patterns is not None:
        return patterns
    return (
        "It has no simple form as a path pattern. Write path patterns instead, such as "
        f'"{example_pattern(regex)}", in which "*" is anything within a name and "**" any number '
        "of names."
    )


def _only_in_torch(spec: TorchSpec, path: str) -> list[Problem]:
    """What speaks of torch's weights, or of DeepSpeed's way to hold them."""
    problems = []
    flat = isinstance(spec.shape, list) and all(size == -1 for size in spec.shape)
    if spec.shape is not None and not flat:
        works = (
            "A fused weight would be cut in contiguous parts, which do not hold the same share of "
            "each part of it: give the model one weight each, and remove the key."
        )
        problems.append(Problem(f"{path}.shape", shown(spec.shape), works))
    if spec.partition_dim not in (None, TORCH_DIM.get(spec.partition_type, spec.partition_dim)):
        works = (
            f'It counts the dims of a torch weight, of which "{spec.partition_type}" cuts '
            f"{TORCH_DIM[spec.partition_type]}. Remove it, or write layer_specs as a mapping, in "
            'which {"type": "column", "dim": 1} counts those of the array here.'
        )
        problems.append(Problem(f"{path}.partition_dim", str(spec.partition_dim), works))
    if spec.model_types is not None:
        works = "A config is for one model: keep the specs that are meant, and remove the key."
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
        f"Otherwise name the weights in {SPECS}, or neither: the model's logical axes are taken, "
        "or what to cut is inferred from the traced program."
    )
    return Problem(PRESET, shown(name), " ".join(filter(None, (works, hint, rest))))
