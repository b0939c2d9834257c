"""Resolution of "auto" values, which Hugging Face fills in from a Trainer's arguments.

Here the rest of the config determines the value, or the key is refused by name.
"""

from collections.abc import Callable
from typing import Any

from jaxspeed.config.batch import ACCUMULATION, MICRO, TRAIN
from jaxspeed.config.problems import Problem
from jaxspeed.config.tree import VOCABULARY, read

Tree = dict[str, Any]

LEAVE_OUT = object()
"""Result for an "auto" that other keys or the default determine: the key is removed."""

# Keys with a value "auto" of their own.
OWN_AUTO = {
    "parallel.gradient_reduction",
    "parallel.tensor_overlap",
    "parallel.infer_tensor_cuts",
    "pipeline.stages",
}


def _number(path: str, factor: int = 1) -> Callable[[Tree], Any]:
    def resolve(tree: Tree) -> Any:
        value = read(tree, path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value * factor

    return resolve


def _batch(tree: Tree) -> Any:
    known = any(isinstance(tree.get(key), int | float) for key in (TRAIN, MICRO))
    return LEAVE_OUT if known or read(tree, "elasticity.enabled") is True else None


def _unless(path: str) -> Callable[[Tree], Any]:
    return lambda tree: False if read(tree, path) is True else None


RESOLVERS: dict[str, tuple[str, Callable[[Tree], Any]]] = {
    **dict.fromkeys((TRAIN, MICRO, ACCUMULATION), (f"{TRAIN} or {MICRO}", _batch)),
    "optimizer.params.lr": (
        "scheduler.params.warmup_max_lr",
        _number("scheduler.params.warmup_max_lr"),
    ),
    "scheduler.params.warmup_max_lr": ("optimizer.params.lr", _number("optimizer.params.lr")),
    "scheduler.params.total_num_steps": ("run.steps", _number("run.steps")),
    "fp16.enabled": ("bf16.enabled true", _unless("bf16.enabled")),
    "bf16.enabled": ("fp16.enabled true", _unless("fp16.enabled")),
    "mesh.tensor": ("tensor_parallel.autotp_size", _number("tensor_parallel.autotp_size")),
    "tensor_parallel.autotp_size": ("mesh.tensor", _number("mesh.tensor")),
    "zero_optimization.stage3_param_persistence_threshold": (
        "model.config.hidden_size, times 10 as Hugging Face does",
        _number("model.config.hidden_size", 10),
    ),
}


def accepts_auto() -> set[str]:
    """Keys that may hold "auto"."""
    return OWN_AUTO | RESOLVERS.keys() | _harmless()


def resolve_autos(tree: Tree) -> tuple[Tree, list[Problem], dict[str, Any]]:
    """Resolve every "auto": (the tree without them, unresolved ones, resolved values by path)."""
    problems: list[Problem] = []
    resolved: dict[str, Any] = {}
    harmless = _harmless()

    def walk(node: Tree, prefix: str) -> Tree:
        result: Tree = {}
        for key, value in node.items():
            path = prefix + key
            if isinstance(value, dict):
                value = walk(value, f"{path}.") if path not in VOCABULARY else value
            elif value == "auto" and path in VOCABULARY and path not in OWN_AUTO:
                value = LEAVE_OUT if path in harmless else _resolved(path, tree, problems)
                resolved[path] = None if value is LEAVE_OUT else value
                if value is LEAVE_OUT:
                    continue
            result[key] = value
        return result

    return walk(tree, ""), problems, resolved


def _resolved(path: str, tree: Tree, problems: list[Problem]) -> Any:
    source, resolver = RESOLVERS.get(path, ("", lambda tree: None))
    value = resolver(tree)
    if value is not None:
        return value
    works = "Write a value, or remove the key to take its default."
    if source:
        works = f"It is resolved from {source}, which the config does not set. {works}"
    problems.append(Problem(path, '"auto", which the config cannot resolve', works))
    return LEAVE_OUT


def _harmless() -> set[str]:
    return {path for path, key in VOCABULARY.items() if key.verdict == "harmless"}
