"""Parity fails when the step is broken: each mutation takes one thing away."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.traced_loss import micro_batch_loss
from jaxspeed.train import gradients
from jaxspeed.user_models import nnx_model
from tests.train.cases import CASES
from tests.train.parity import leaf_differences, plain, run

STEPS = 2


def differs(name: str, stage: int) -> bool:
    case = CASES[name]
    ours = run(case, stage, 4, "sgd", steps=STEPS)
    reference = plain(case, 4, "sgd", steps=STEPS)
    # Two steps move a norm's scale by few of fp32's steps; a mutation changes it by a tenth.
    return max(leaf_differences(case, ours, reference).values()) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("name", "stage"), [("gpt2", 0), ("dropout", 2), ("batch statistics", 3)])
def test_nothing_differs_as_it_is(name, stage):
    assert not differs(name, stage)


def test_the_sum_over_ranks_is_needed(monkeypatch):
    """Stages 0 and 1: each rank's partial gradients leave a shard_map; keep the first rank's."""
    real = jax.shard_map

    def first_rank_only(*args, **kwargs):
        mapped = real(*args, **kwargs)

        def keep(*operands):
            parts = mapped(*operands)
            return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), parts)

        return keep

    monkeypatch.setattr(gradients.jax, "shard_map", first_rank_only)
    assert differs("pair", 0)


def test_ranks_and_micro_batches_are_weighed(monkeypatch):
    real = gradients.Gradients._micro

    def unweighed(*args, **named):
        sums, variables = real(*args, **named)
        return sums._replace(weight=jnp.ones_like(sums.weight)), variables

    monkeypatch.setattr(gradients.Gradients, "_micro", unweighed)
    assert differs("pair", 0)
    assert differs("pair", 2)


def test_the_keys_of_micro_batches_differ(monkeypatch):
    real = nnx_model.micro_batch_key
    monkeypatch.setattr(nnx_model, "micro_batch_key", lambda key, step, micro: real(key, step, 0))
    assert differs("dropout", 2)


@pytest.mark.full
def test_a_micro_batch_is_a_slice_of_each_ranks_part(monkeypatch):
    """Not of the global batch, one after the other: other samples would share statistics."""

    def one_after_the_other(batch, count, ranks):
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

    monkeypatch.setattr(gradients, "micro_batches", one_after_the_other)
    assert differs("batch statistics", 3)


@pytest.mark.full
def test_the_gradient_of_a_unit_is_needed(monkeypatch):
    """ZeRO 3's gather is differentiated by hand: leave one scatter's result out."""
    real = micro_batch_loss.ShardedParam.scatter
    monkeypatch.setattr(
        micro_batch_loss.ShardedParam, "scatter", lambda self, g, like: 0 * real(self, g, like)
    )
    assert differs("batch statistics", 3)
