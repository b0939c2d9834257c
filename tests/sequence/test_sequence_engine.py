"""What else runs on a mesh with an axis of sequences, and what its programs communicate."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import models
from jaxspeed.errors import BatchError, ConfigError
from jaxspeed.hlo import collectives
from jaxspeed.metrics.mfu import program_model_flops
from jaxspeed.placement.specs import spec_axes
from jaxspeed.planner.trace.trace_ir import all_ops, open_program
from jaxspeed.train_state.state_storage import StateStorage
from tests.sequence.tiny_llama import (
    SEQ,
    SIZES,
    VOCAB,
    assert_equal,
    batches,
    config,
    plain,
    snapshot,
    trained,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine on seq 8, folder of its checkpoint after a step, the next losses)."""
    folder = tmp_path_factory.mktemp("saved")
    settings = config(3, mesh={"seq": 8}, optimizer={"type": "Adam", "params": {"lr": 0.01}})
    engine = jaxspeed.initialize(config=settings)
    engine.train_batch(batches()[0])
    engine.save_checkpoint(folder)
    engine.wait()
    return engine, folder, [float(engine.train_batch(batch)["loss"]) for batch in batches()]


@pytest.mark.sampled
def test_a_checkpoint_goes_from_seq_to_data_and_back(saved, tmp_path):
    _, folder, losses = saved
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    for stage, mesh, out in ((1, {"data": 8}, tmp_path), (2, {"seq": 8}, None)):
        engine = jaxspeed.initialize(config=config(stage, mesh=mesh, **adam))
        engine.load_checkpoint(folder)
        if out is not None:
            engine.save_checkpoint(folder := out)
            engine.wait()
        found = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
        np.testing.assert_allclose(found, losses, rtol=1e-6)


@pytest.fixture
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(self: Any) -> Any:
        raise AssertionError("allocates")

    monkeypatch.setattr(StateStorage, "fresh", property(fresh))


@pytest.mark.usefixtures("nothing_is_allocated")
def test_a_kind_that_heads_do_not_divide_is_refused_before_anything_is_allocated():
    model = {"family": "llama", "preset": "tiny", "config": {**SIZES, "num_attention_heads": 6}}
    model["config"] |= {"head_dim": 4}
    settings = config(3, mesh={"seq": 8}, parallel={"sequence": {"kind": "ulysses"}}, model=model)
    with pytest.raises(ConfigError, match="6 query heads do not divide by 8 devices"):
        jaxspeed.initialize(config=settings)


class _Two(nnx.Module):
    """One attention with a bias, and one of 6 heads."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, 48)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table[tokens]
        a, b = (x.reshape(*x.shape[:2], heads, -1) for heads in (8, 6))
        place = jnp.arange(x.shape[1])
        bias = -jnp.abs(place[:, None] - place) / 7
        a = jax.nn.dot_product_attention(a, a, a, bias=bias[None, None])
        return a.reshape(x.shape) + jax.nn.dot_product_attention(b, b, b).reshape(x.shape)


@pytest.mark.usefixtures("nothing_is_allocated")
def test_all_attentions_that_a_kind_cannot_have_are_in_one_error():
    settings = config(0, mesh={"seq": 8}, parallel={"sequence": {"kind": "ulysses"}})
    del settings["model"]
    with pytest.raises(ConfigError) as found:
        jaxspeed.initialize(
            _Two,
            lambda model, batch: jnp.mean(model(batch["tokens"]) ** 2),
            config=settings,
            example_batch={"tokens": np.zeros((1, SEQ), np.int32)},
        )
    text = str(found.value)
    assert text.startswith("2 problems ")
    assert "6 query heads" in text and "something else between its products" in text


def _mean_of_squares(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["tokens"]) ** 2)


@pytest.mark.usefixtures("nothing_is_allocated")
@pytest.mark.parametrize(
    ("sequence", "length", "text"),
    [
        ({"layout": "zigzag"}, 36, "zig-zag has 16 chunks, which do not divide 36 tokens"),
        ({"dims": {"images": 1}}, SEQ, "names 'images'; the batch has tokens"),
        ({"dims": {"tokens": 2}}, SEQ, r"has 2 for 'tokens', and tokens is \[1, 32\]"),
        ({"kind": "both"}, SEQ, "seq 2 has no groups of devices: use ulysses, ring or gather"),
    ],
)
def test_other_settings_are_refused_before_anything_is_allocated(sequence, length, text):
    mesh = {"seq": 2} if "kind" in sequence else {"seq": 8}
    settings = config(0, mesh=mesh, parallel={"sequence": sequence})
    del settings["model"]
    example = {"tokens": np.zeros((1, length), np.int32)}
    with pytest.raises((BatchError, ConfigError), match=text):
        jaxspeed.initialize(_Two, _mean_of_squares, config=settings, example_batch=example)


@pytest.mark.usefixtures("nothing_is_allocated")
def test_a_batch_without_positions_is_refused_before_anything_is_allocated():
    settings = config(0, mesh={"seq": 8})
    del settings["model"]
    example = {"x": np.zeros((1, SEQ, 48), np.float32)}
    with pytest.raises(BatchError, match="no array of the batch is known to have a dim of pos"):
        jaxspeed.initialize(
            lambda rngs: nnx.Linear(48, 2, rngs=rngs),
            lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
            config=settings,
            example_batch=example,
        )


def test_evaluation_is_that_of_one_device(saved):
    """A mean over targets, whose number differs from shard to shard."""
    engine, *_ = saved
    built = models.build("llama", "tiny", SIZES)
    total, weight = jax.jit(built.loss)(engine.module, batches()[1])
    found = engine.eval_batch(batches()[1])
    np.testing.assert_allclose(found["loss"], total / weight, rtol=1e-6)
    assert found["weight"] == weight


@pytest.mark.sampled
def test_generation_is_replicated_over_the_axis():
    prompts = [[5, 9, 2, 11, 3], [7] * 17]
    one = jaxspeed.initialize(config=config(0, mesh={"data": 1}), devices=jax.devices()[:1])
    fresh = jaxspeed.initialize(config=config(3, mesh={"seq": 4, "data": 2}))
    ours, theirs = (
        [row.tokens for row in each.generate(prompts, 6, temperature=0)] for each in (fresh, one)
    )
    assert ours == theirs


def test_a_long_prompt_that_is_replicated_over_the_axis_has_no_scores_of_all_rows(saved):
    program, length = saved[0].program, 1024
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    sequence = replace(program.traced_loss.sequence, shards=False)  # as in generation
    objective = replace(program.traced_loss, sequence=sequence)
    number = jnp.asarray(0)
    with jax.set_mesh(program.mesh):
        rest = (program.model.variables, {"tokens": tokens, "targets": tokens}, number, number)
        traced = objective.trace(rest, train=False)
    step = open_program(traced.closed, "cpu")
    largest = max(v.size for op in all_ops(step) for v in op.outs)
    assert largest < SIZES["num_attention_heads"] * length**2


@pytest.mark.sampled
def test_a_step_is_checked_against_one_device_and_plain_flax(saved):
    report = saved[0].check(batches()[0])
    assert report.ok, str(report)


def test_tokens_and_model_flops_are_those_without_the_axis(saved):
    program = saved[0].program
    tokens = np.zeros((8, 33), np.int32)
    with_targets = program_model_flops(program, batches()[0])
    assert with_targets == program_model_flops(program, {"tokens": tokens})


@pytest.mark.sampled
def test_tokens_of_seq_plus_one_enter_unsharded():
    """And the update is the same: what is cut from them is constrained."""
    given = []
    for batch in batches():
        tokens = np.concatenate([batch["tokens"], np.zeros_like(batch["tokens"][:, :1])], 1)
        last = np.concatenate([batch["segment_ids"], np.full_like(tokens[:, :1], -1)], 1)
        given.append({"tokens": tokens, "segment_ids": last})
    engine, run = trained(given, config(2, mesh={"seq": 4}))
    assert_equal(run, plain(given))
    specs = engine.program.batch_shardings(given[0])
    assert all(not spec_axes(at.spec[1:]) for at in specs.values())


@pytest.mark.sampled
def test_gradients_of_data_ranks_are_reduced_once_a_step_and_those_of_positions_each_micro_batch():
    """At stages 0 and 1: a rank's part is computed in the global view of `seq`."""
    parameters = 0
    for stage in (0, 1):
        engine = jaxspeed.initialize(config=config(stage, 4, mesh={"data": 2, "seq": 4}))
        parameters = sum(x.size * 4 for x in snapshot(engine).values())
        found = engine.compiled(batches()[0]).collectives
        kinds = ("all-reduce", "reduce-scatter")
        gradients = [c for c in found if c.kind in kinds and c.bytes > 64]
        inside = {axis for c in gradients if c.in_accumulation for axis in c.axes}
        assert inside == {"seq"}, stage
        over_data = sum(c.bytes for c in gradients if "data" in c.axes and not c.in_accumulation)
        assert parameters <= over_data <= 1.1 * parameters
        reduction, _ = engine.program.in_mesh(engine.program.gradients.reduction)(
            engine.program.model.variables, batches()[0], 0
        )
        assert reduction == "step"


@pytest.mark.default_cases("ulysses")
@pytest.mark.parametrize(
    ("kind", "exchanges"),
    [("gather", {"all-gather"}), ("ring", {"collective-permute"}), ("ulysses", {"all-to-all"})],
    ids=["gather", "ring", "ulysses"],
)
def test_attention_exchanges_what_the_config_says(kind, exchanges):
    """In the forward pass at stage 0, which gathers no weights."""
    settings = config(0, mesh={"seq": 2, "data": 4}, parallel={"sequence": {"kind": kind}})
    engine = jaxspeed.initialize(config=settings)
    with engine.program.set_mesh():
        lowered = engine.program.evaluate.lower(
            engine.program.state, engine.program.abstract_batch(batches()[0])
        )
    found = collectives(lowered.compile().as_text(), engine.program.mesh)
    large = {c.kind for c in found if c.axes == ("seq",) and c.elements > 200}
    assert large - {"all-reduce"} == exchanges


@pytest.mark.sampled
def test_images_are_sharded_along_the_dim_that_the_config_names():
    rng = np.random.default_rng(0)
    given = [
        {
            "images": rng.normal(size=(8, 32, 32, 3)).astype(np.float32),
            "labels": rng.integers(0, 10, 8).astype(np.int32),
        }
        for _ in range(2)
    ]
    of_model = {"model": {"family": "vit", "preset": "tiny"}}
    dims = {"parallel": {"sequence": {"dims": {"images": 1}}}}
    engine, run = trained(given, config(1, mesh={"seq": 4}, **of_model, **dims))
    alone = jaxspeed.initialize(config=config(0, **of_model), devices=jax.devices()[:1])
    losses = [float(alone.train_batch(batch)["loss"]) for batch in given]
    np.testing.assert_allclose(run.losses, losses, rtol=1e-6)
    assert spec_axes(engine.program.batch_shardings(given[0])["images"].spec) >= {"seq"}
    unnamed = jaxspeed.initialize(config=config(1, mesh={"seq": 4}, **of_model))
    with pytest.raises(BatchError, match=r"mesh\.seq is 4, and no array of the batch"):
        unnamed.train_batch(given[0])


@pytest.mark.sampled
def test_a_mixture_of_experts_is_sharded_over_both_axes():
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
    of_model = {"model": {"family": "mixtral", "preset": "tiny", "config": sizes}}
    alone = jaxspeed.initialize(config=config(0, **of_model), devices=jax.devices()[:1])
    losses = [float(alone.train_batch(batch)["loss"]) for batch in batches()]
    for mesh in ({"seq": 2, "expert": 2}, {"seq": 4}):
        _, run = trained(batches(), config(1, mesh=mesh, **of_model))
        np.testing.assert_allclose(run.losses, losses, rtol=1e-6)
        update = {path: value - run.first[path] for path, value in run.last.items()}
        for path, value in alone.parameters.items():
            expected = value - run.first[path]
            error = np.linalg.norm(update[path] - expected)
            assert error <= 1e-5 * np.linalg.norm(expected) + 2e-7 * np.linalg.norm(value), path
