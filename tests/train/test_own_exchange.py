"""An exchange of a test's own: it counts, and the step's numbers are those of the default."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxspeed.config import load_config
from jaxspeed.engine.engine import Engine
from jaxspeed.train.build import build_program
from jaxspeed.zero3 import BY_CONSTRAINT, Exchange, InOrder, product_vjp
from tests.engine import tiny

LAYERS = 3  # of the pair


@dataclass(frozen=True)
class Counting(Exchange):
    """Constraints, counted as the step is traced; JAX differentiates no call of it."""

    counts: Counter[str] = field(default_factory=Counter, compare=False)

    def gather(self, stored: Any, shards: Any, place: Any) -> list[Any]:
        self.counts["calls"] += 1
        self.counts["gathered"] += len(shards)
        return BY_CONSTRAINT.gather(stored, shards, place)

    def scatter(self, stored: Any, grads: Any, likes: Any, place: Any) -> list[Any]:
        self.counts["scattered"] += len(grads)
        return BY_CONSTRAINT.scatter(stored, grads, likes, place)


class Keeping(Counting):
    """It saves the gathered parameters for the backward pass, which then gathers none."""

    def saved(self, stored: Any, full: Any, place: Any) -> list[Any]:
        return list(full)

    def gather_again(self, stored: Any, shards: Any, saved: Any, place: Any) -> list[Any]:
        assert len(saved) == len(shards)
        return list(saved)


def trained(exchange: Exchange, **more: Any) -> tuple[Engine, dict[str, np.ndarray]]:
    config = load_config(tiny.config(3, **more))
    program = build_program(config, tiny.PAIR, tiny.squared_error, exchange=exchange)
    engine = Engine(program, program.init(0))
    for step in range(2):
        engine.train_batch(tiny.batch(program.batch.train, seed=step))
    return engine, {path: np.asarray(x) for path, x in engine.parameters.items()}


def same(found: Any, expected: Any) -> None:
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


REMAT = {"parallel": {"remat": "full"}}


@pytest.mark.parametrize("more", [{}, REMAT, {"parallel": {"remat": {"every_n": LAYERS}}}])
def test_every_gather_and_scatter_of_a_step_is_the_exchanges(more):
    counting = Counting()
    _, found = trained(counting, **more)
    assert counting.counts["scattered"] == LAYERS + 1, "a layer's weight, and the head"
    assert counting.counts["gathered"] >= 2 * (LAYERS + 1), "in both passes"
    same(found, trained(BY_CONSTRAINT, **more)[1])


def test_what_an_exchange_saves_is_given_to_its_backward_pass():
    counting, keeping = Counting(), Keeping()
    found = [trained(exchange)[1] for exchange in (counting, keeping)]
    assert keeping.counts["gathered"] < counting.counts["gathered"]
    assert keeping.counts["scattered"] == counting.counts["scattered"]
    same(*found)


def test_a_matmul_that_gathers_its_own_weight_asks_it_too(monkeypatch):
    monkeypatch.setattr(product_vjp, "ROWS", 0)
    monkeypatch.setattr(product_vjp, "INPUTS", 0)
    counting = Counting()
    _, found = trained(counting, **REMAT)
    assert counting.counts["scattered"] > 0
    assert counting.counts["calls"] >= 2 * counting.counts["scattered"]
    same(found, trained(BY_CONSTRAINT, **REMAT)[1])


@pytest.mark.full
def test_stages_embedding_and_head_of_a_pipeline_ask_it():
    more = {
        "mesh": {"pipe": 2},
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 2,
    }
    seen: set[tuple[int, ...]] = set()

    class Seeing(Counting):
        def gather(self, stored: Any, shards: Any, place: Any) -> list[Any]:
            seen.update(s.shape for s in stored)
            return super().gather(stored, shards, place)

    _, found = trained(Seeing(), **more)
    assert {(8, 8), (8, 1)} <= seen, "a layer of a stage, and the head"
    same(found, trained(BY_CONSTRAINT, **more)[1])


def test_the_order_of_simulated_devices_is_a_wrapper_around_any_exchange():
    """Data between exchanges: no number changes, and each later exchange gets a dependency."""
    seen: Counter[str] = Counter()

    def order(arrays: Any, first: Any, place: Any) -> list[Any]:
        seen["ordered"] += len(arrays)
        never = sum((x.reshape(-1)[0].astype(np.float32) for x in first), np.float32(0)) * 0
        return [x + never.astype(x.dtype) for x in arrays]

    counting = Counting()
    _, found = trained(InOrder(counting, order))
    assert seen["ordered"] >= 2 * LAYERS
    assert counting.counts["scattered"] == LAYERS + 1
    same(found, trained(BY_CONSTRAINT)[1])
