"""The files through which a parameter, a batch and the ZeRO stage reach the compiled program.

Measured, not read: `initialize` and the first `train_batch` of a small gpt2 (ZeRO 3, bf16, two
micro-batches; no pipeline, no offload) run under `sys.setprofile`. A file of the package counts
where one of its functions is called with

- the parameter: an array, tracer or shape with the shape of one chosen weight (unsharded, one
  layer of it, or its shard; no other array of the run has these shapes, so its gradient and moments
  count as well), or an object whose `path` is that weight's, as the table's rows have it;
- the batch: an array, tracer or shape of integers whose last dim is the batch's own;
- the stage: a marked integer that takes the place of `zero_optimization.stage`. A file that reads
  the attribute `stage` of the config's section, or of an object that holds the marked integer,
  counts too. "stage in the source" lists, by a search of the text, every file that names the
section or reads the stage of it or of the table, reports and planning included; "stage read in
the source" those of them whose code reads the attribute `stage`: the others name the section in a
message, or read another of its keys.

"direct" is where the argument itself is the thing, or one of `*args`; "held" adds arguments that
hold it at most two levels deep in tuples, lists, dicts and fields of dataclasses, the usual case
being a dict of all parameters. Of `self` only the object itself counts, not what it holds: else
each method of a program would. Variables of a jaxpr do not count.
"""

import ast
import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

import jaxspeed

PACKAGE = Path(jaxspeed.__file__).parent
OURS = tuple(str(path) for path in PACKAGE.iterdir() if path.name != "models")
HIDDEN, LAYERS, SEQ, SHARDS = 40, 3, 22, 8
PARAMETER = "blocks/mlp/up/kernel"
# Of no other parameter: the weight of all layers and of one, unsharded and sharded over `data`.
SHAPES = {
    (*layers, *weight)
    for layers in ((), (LAYERS,))
    for weight in (
        (HIDDEN, 4 * HIDDEN),
        (HIDDEN // SHARDS, 4 * HIDDEN),
        (HIDDEN, 4 * HIDDEN // SHARDS),
    )
}
DEPTH = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "model": {
        "family": "gpt2",
        "config": {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 5,
            "vocab_size": 128,
            "max_position_embeddings": SEQ,
        },
    },
}


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


class Stage(int):
    """The marked integer."""


def flow() -> dict[str, Any]:
    """{thing: {"direct": files, "held": files, and how many of each}}."""
    things = {"parameter": _is_parameter, "batch": _is_batch, "stage": _is_stage}
    seen: dict[str, dict[str, set[str]]] = {
        name: {"direct": set(), "held": set()} for name in things
    }
    config = jaxspeed.Config.load(CONFIG)
    readers: set[str] = set()
    with _reads_of_stage(config, readers):
        config = jaxspeed.Config.load(CONFIG)  # loading reads it as well
        object.__setattr__(config, "zero_optimization", _marked(config.zero_optimization))
        sys.setprofile(lambda frame, event, arg: _called(frame, event, things, seen))
        try:
            engine = jaxspeed.initialize(config=config)
            samples = engine.program.batch.train
            engine.train_batch({"tokens": np.zeros((samples, SEQ + 1), np.int32)})
        finally:
            sys.setprofile(None)
        _check_shapes(engine.placements)
        engine.close()
    seen["stage"]["direct"] |= readers
    listed = {name: _listed(**found) for name, found in seen.items()}
    mentions, reads = _mentions_of_stage(), _reads_in_the_source()
    return {**listed, "stage in the source": mentions, "stage read in the source": reads}


def _listed(direct: set[str], held: set[str]) -> dict[str, Any]:
    return {
        "direct": len(direct),
        "direct_or_held": len(direct | held),
        "direct_files": sorted(direct),
        "held_files": sorted(held - direct),
    }


# -- what is looked for ---------------------------------------------------------------------------


def _is_parameter(x: Any) -> bool:
    if isinstance(x, _ARRAYS):
        return x.shape in SHAPES
    return dataclasses.is_dataclass(x) and getattr(x, "path", None) == PARAMETER


def _is_batch(x: Any) -> bool:
    return (
        isinstance(x, _ARRAYS) and x.shape[-1:] == (SEQ + 1,) and np.issubdtype(x.dtype, np.integer)
    )


def _is_stage(x: Any) -> bool:
    return type(x) is Stage


def _check_shapes(table: Any) -> None:
    """Raise unless the shapes belong to one weight and to no other."""
    ours = table[PARAMETER]
    shard = table.sharding(ours.source).shard_shape(ours.shape(ours.source))
    assert {ours.leaf.shape, tuple(shard)} <= SHAPES, (ours.leaf.shape, shard)
    others = [row.leaf.shape for row in table if row is not ours]
    assert not {*others, *(shape[1:] for shape in others)} & SHAPES, others


# -- calls ----------------------------------------------------------------------------------------


def _called(frame: FrameType, event: str, things: Mapping[str, Any], seen: Any) -> None:
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(OURS):
        return
    named = code.co_argcount + code.co_kwonlyargcount
    variadic = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    names, values = code.co_varnames, frame.f_locals
    arguments = [(name, values[name]) for name in names[:named] if name in values]
    for name in names[named : named + variadic]:
        more = values.get(name, ())
        arguments += [("", x) for x in (more.values() if isinstance(more, dict) else more)]
    file = _file(code.co_filename)
    for thing, matches in things.items():
        if file in seen[thing]["direct"]:
            continue
        for name, value in arguments:
            if matches(value):
                seen[thing]["direct"].add(file)
            elif name != "self" and file not in seen[thing]["held"] and _holds(value, matches):
                seen[thing]["held"].add(file)


def _holds(value: Any, matches: Any, depth: int = DEPTH) -> bool:
    if depth == 0:
        return False
    return any(matches(part) or _holds(part, matches, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)


def _file(name: str) -> str:
    return str(Path(name).relative_to(PACKAGE))


# -- the stage ------------------------------------------------------------------------------------


def _marked(section: Any) -> Any:
    return section.model_copy(update={"stage": Stage(section.stage)})


@contextlib.contextmanager
def _reads_of_stage(config: Any, readers: set[str]) -> Iterator[None]:
    """Record files that read the stage as an attribute, within the context, in `readers`."""
    section = type(config.zero_optimization)
    holders = {section, jaxspeed.PlacementTable}

    def hooked(real: Any) -> Any:
        def read(self: Any, name: str) -> Any:
            value = real(self, name)
            if name == "stage" and (type(self) is section or _is_stage(value)):
                file = sys._getframe(1).f_code.co_filename
                if file.startswith(OURS):
                    readers.add(_file(file))
            return value

        return read

    real = {holder: holder.__getattribute__ for holder in holders}
    for holder in holders:
        holder.__getattribute__ = hooked(real[holder])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for holder in holders:
            holder.__getattribute__ = real[holder]  # type: ignore[method-assign]


def _mentions_of_stage() -> dict[str, Any]:
    pattern = re.compile(r"\bzero_optimization\b|\b(zero|table)\.stage\b")
    files = sorted(PACKAGE.rglob("*.py"))
    found = [_file(str(file)) for file in files if pattern.search(file.read_text())]
    return {"files": len(found), "listed": found}


def _reads_in_the_source() -> dict[str, Any]:
    owners = ("zero", "zero_optimization", "table")

    def reads(file: Path) -> bool:
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == "stage"
            and getattr(node.value, "attr", getattr(node.value, "id", None)) in owners
            for node in ast.walk(ast.parse(file.read_text()))
        )

    found = [_file(str(file)) for file in sorted(PACKAGE.rglob("*.py")) if reads(file)]
    return {"files": len(found), "listed": found}
