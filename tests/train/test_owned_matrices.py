"""Runs whose optimizer's matrices are computed by owners train and resume as on one device."""

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.placement.paths import flat_with_paths
from tests.engine import tiny

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
LLAMA = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 8}
# All experts are chosen, so that no rounding error decides which.
MODELS = {"llama": LLAMA, "mixtral": {**LLAMA, "num_experts": 4, "num_experts_per_tok": 4}}
# Sides of full rank alone: elsewhere rounding errors decide the eigenbasis of the null space.
PARAMS = {
    "Muon": {"lr": 0.01},
    "NorMuon": {"lr": 0.01},
    "SOAP": {"lr": 0.01, "max_precond_dim": 8, "precondition_frequency": 3},
}
STEPS, SAMPLES = 10, 8


def engine(type_, family, stage, mesh, accumulation, devices=None, **more):
    ranks = 1
    for axis in ("replica", "data", "expert"):
        ranks *= mesh.get(axis, 1)
    return jaxspeed.initialize(
        config={
            **tiny.config(stage),
            "model": {"family": family, "config": MODELS[family]},
            "data": {"source": "synthetic", "seq_len": 16},
            "optimizer": {"type": type_, "params": PARAMS[type_]},
            "mesh": mesh,
            "train_micro_batch_size_per_gpu": SAMPLES // ranks // accumulation,
            "gradient_accumulation_steps": accumulation,
            **more,
        },
        devices=devices,
    )


def losses(of, steps):
    batches = [{"tokens": np.random.default_rng(i).integers(0, 16, (SAMPLES, 17))} for i in steps]
    return [float(of.train_batch(batch)["loss"]) for batch in batches]


CASES = {
    "llama, ZeRO 3, tensor": ("llama", 3, {"data": 4, "tensor": 2}, 2),
    "llama, pipe": ("llama", 1, {"pipe": 2, "data": 4}, 2),
    "llama, stage 0": ("llama", 0, {"data": 8}, 1),
    "mixtral, expert": ("mixtral", 2, {"data": 2, "expert": 2, "tensor": 2}, 2),
}


@pytest.mark.default_cases("Muon-llama, ZeRO 3, tensor")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("type_", PARAMS)
def test_ten_steps_equal_those_of_one_device(type_, case):
    family, _, _, accumulation = CASES[case]
    ours = engine(type_, *CASES[case])
    assert ours.placements.owned
    plain = engine(type_, family, 0, {}, accumulation, jax.devices()[:1])
    before = {path: np.asarray(x) for path, x in plain.parameters.items()}
    np.testing.assert_allclose(losses(ours, range(STEPS)), losses(plain, range(STEPS)), rtol=1e-5)
    for path, start in before.items():
        want = np.asarray(plain.parameters[path], np.float64) - start
        difference = np.asarray(ours.parameters[path], np.float64) - start - want
        assert np.linalg.norm(difference) <= 1e-4 * np.linalg.norm(want), path


@pytest.mark.default_cases("SOAP-llama, ZeRO 3, tensor")
@pytest.mark.parametrize("case", ["llama, ZeRO 3, tensor", "mixtral, expert"])
@pytest.mark.parametrize("type_", ["NorMuon", "SOAP"])
def test_a_checkpoint_has_states_by_parameter_and_goes_on_on_another_mesh(type_, case, tmp_path):
    ours = engine(type_, *CASES[case])
    losses(ours, range(4))
    ours.save_checkpoint(tmp_path)
    ours.wait()
    (header,) = tmp_path.glob("*/checkpoint.json")
    names = header.read_text()
    for state in {"SOAP": ("mu", "columns", "gram_columns"), "NorMuon": ("second_moment",)}[type_]:
        assert f"by_matrix/{state}/blocks/attn/k_proj/kernel" in names
    again = engine(type_, *CASES[case])
    other = engine(type_, CASES[case][0], 1, {"data": 4, "replica": 2}, 1)
    for each in (again, other):
        each.load_checkpoint(tmp_path)
    more = losses(ours, range(4, 8))
    assert losses(again, range(4, 8)) == more
    np.testing.assert_allclose(losses(other, range(4, 8)), more, rtol=1e-5)


class Adopting(tiny.Listed):
    """A parameter's path has the segment of a state's names that is the optimizer's."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.opt = self.blocks
        del self.blocks

    def __call__(self, x):
        x = self.input(x)
        for block in self.opt:
            x = block(x)
        return self.head(x)


@pytest.mark.sampled
def test_a_parameter_named_as_the_state_is_saved(tmp_path):
    optimizer = {"type": "NorMuon", "params": PARAMS["NorMuon"]}
    ours, again = (tiny.engine(Adopting, stage=1, optimizer=optimizer) for _ in range(2))
    ours.train_batch(tiny.batch())
    ours.save_checkpoint(tmp_path)
    ours.wait()
    again.load_checkpoint(tmp_path)
    for path, x in flat_with_paths(ours.state.opt).items():
        np.testing.assert_array_equal(flat_with_paths(again.state.opt)[path], x, err_msg=path)


ELSEWHERE = {
    "host": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "servers": {"parallel": {"data_reduction": "parameter_server", "servers": 4}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("type_", PARAMS)
def test_state_in_host_memory_or_on_servers(type_, where):
    more = dict(ELSEWHERE[where])
    if where == "servers":  # four workers
        more |= {"train_micro_batch_size_per_gpu": 2}
    place = (1, {"data": 8}) if where == "host" else (0, {})
    ours = engine(type_, "llama", *place, 1, **more)
    plain = engine(type_, "llama", 0, {}, 1, jax.devices()[:1])
    np.testing.assert_allclose(losses(ours, range(5)), losses(plain, range(5)), rtol=1e-5)
