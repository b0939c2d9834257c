"""Checkpoints do not depend on pipeline stages: blocks are restored for any number of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxspeed
from jaxspeed.placement.paths import flat_with_paths
from tests.checkpoint import states
from tests.system import stacks

WIDTH, LAYERS = 6, 5
INTERLEAVED = {"pipeline_schedule": "interleaved"}
NAMES = {"scanned": {"logical_axes": {"layers/w": ["layers", None, None]}}, "listed": {}}
MESHES = {
    "no stages": {"stage": 3},
    "two stages": {"stage": 1, "mesh": {"pipe": 2}},
    "chunks": {"stage": 2, "mesh": {"pipe": 2}, "parallel": INTERLEAVED},
    "chunks, stage 0, bf16": {
        "stage": 0,
        "mesh": {"pipe": 2},
        "bf16": {"enabled": True},
        "parallel": INTERLEAVED,
    },
}


def engine(form: str, stage: int, parallel=None, **sections):
    config = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "parallel": {**NAMES[form], **(parallel or {})},
        **sections,
    }
    return jaxspeed.initialize(stacks.FORMS[form](LAYERS, WIDTH), stacks.loss, config)


def with_moments(made):
    """The engine with moments that differ from number to number, as after some steps."""
    layout = made.program.layout

    def numbers(x):
        return jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape) if x.ndim else x

    def other(opt):
        return layout.stored(jax.tree.map(numbers, layout.logical(opt)))

    opt = jax.jit(other, out_shardings=layout.shardings())(made.state.opt)
    made.state = replace(made.state, opt=opt)
    return made


@pytest.fixture(scope="module", params=["scanned", "listed"])
def form(request):
    return request.param


@pytest.fixture(scope="module", params=["no stages", "chunks"])
def saved(request, form, tmp_path_factory):
    """(form, folder, what was saved)."""
    folder = tmp_path_factory.mktemp("saved")
    made = with_moments(engine(form, **MESHES[request.param]))
    made.save_checkpoint(folder)
    made.wait()
    return form, folder, states.held(made)


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_number_is_restored_with_its_sharding(saved, mesh):
    form, folder, held = saved
    restored = engine(form, **MESHES[mesh])
    fresh = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), restored.state)
    restored.load_checkpoint(folder)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), restored.state) == fresh
    states.assert_same(states.held(restored), held)


def test_a_device_holds_its_share_of_the_blocks(form):
    """Half of the layers' bytes and of their moments: a width of 6 needs no padding."""
    made = engine(form, **{**MESHES["chunks"], "stage": 0})
    held = flat_with_paths([made.state.params, made.state.opt])
    arrays = [x for path, x in held.items() if "layers" in path]
    assert sum(x.size for x in arrays) == 3 * LAYERS * WIDTH * WIDTH
    shards = [x.addressable_shards[0].data for x in arrays]
    assert sum(x.size for x in shards) * 2 == 3 * LAYERS * WIDTH * WIDTH
