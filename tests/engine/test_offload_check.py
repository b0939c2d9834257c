"""A step that does not move, or rematerialize, what its config sets is an error."""

import dataclasses
import itertools
import logging

import jax
import numpy as np
import pytest
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed.communication import FROM_HOST
from jaxspeed.config import Config
from jaxspeed.engine.offload_check import check_host_bytes, transfer_in, transfer_of
from jaxspeed.errors import JaxspeedError
from jaxspeed.hlo.compiled_report import report
from jaxspeed.offload.streaming import FEWEST
from jaxspeed.offload.transfer_report import (
    ACTIVATIONS,
    GRADIENTS,
    HOST_UPDATE,
    OPTIMIZER,
    PARAMETERS,
)
from jaxspeed.planner.time.host_transfers import _TransferCounter
from jaxspeed.planner.trace import read_step
from jaxspeed.train.build import build_program
from jaxspeed.zero3.residual_policy import ResidualPolicy
from tests.engine.tiny import apply_pair, batch, init_pair, squared_error
from tests.support.covering import covering

LAYERS, EMBED, SEQ, MICRO = 4, 32, 16, 2
SMALL = gpt2.Config(
    hidden_size=EMBED,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=SEQ,
)
PAIR = (init_pair, apply_pair)
BF16 = {"bf16": {"enabled": True}}
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}


def offloaded(stage, *what):
    keys = {f"offload_{name}": {"device": "cpu"} for name in what}
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **keys}}


def program_of(config, devices=4):
    plain = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    }
    return build_program(
        Config.load(plain | config),
        lambda rngs: gpt2.build(SMALL, rngs),
        gpt2.loss,
        devices=jax.devices()[:devices],
    )


@pytest.mark.parametrize("recompute", covering(["stage", "layers", "save"], ["save"]))
def test_stages_offload_what_the_config_sets(recompute):
    config = {
        "mesh": {"pipe": 2, "data": 2},
        "gradient_accumulation_steps": 4,
        "parallel": {"remat": "full", "pipeline_recompute": recompute},
    }
    program, found = moved(config | offloaded(1, "optimizer"))
    waiting = sum(program.table.host_bytes_by_role().values())
    assert found.by_kind == {OPTIMIZER: (waiting, waiting)}


@pytest.mark.default_cases("2-1", "3-3")
@pytest.mark.parametrize(
    ("stage", "accumulation"),
    covering(itertools.product([0, 2, 3], [1, 3]), [(0, 3), (2, 1), (3, 3)]),
)
def test_what_the_host_updates_stays_there(stage, accumulation):
    config = {"gradient_accumulation_steps": accumulation}
    config = BF16 | offloaded(stage, "optimizer") | config
    config["zero_optimization"]["offload_optimizer"]["where"] = "host"
    program, found = moved(config)
    waiting = program.table.host_bytes_by_role()
    assert sum(found.transfers.by_host.values()) == waiting["master"] + waiting["opt"]
    there, back = found.by_kind[HOST_UPDATE]
    # In bf16, or added up in fp32; with a learning rate and its like for each piece.
    grads = sum(each for _, each in _row_bytes(program, "opt")) // (2 if accumulation == 1 else 1)
    assert grads <= back <= 1.1 * grads
    published = sum(each for row, each in _row_bytes(program, "opt") if row.param)
    assert there == published // 2, "16-bit parameters come back, where they are stored"
    if stage < 3:
        # One number of each parameter puts loops in turn on simulated devices.
        assert found.by_kind.get(OPTIMIZER, (0, 0))[0] <= 4 * len(program.table)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_parameters_in_host_memory_are_updated_there(precision):
    """They come for each pass, and only gradients leave the devices."""
    config = precision | offloaded(3, "param", "optimizer")
    config["zero_optimization"]["offload_optimizer"]["where"] = "host"
    program, found = moved(config)
    assert found.by_kind[PARAMETERS][0] > 0 and not found.transfers.stored
    assert found.transfers.written >= {f"params/{row.path}" for row in program.table}
    _, back = found.by_kind[HOST_UPDATE]
    grads = program.table.host_bytes_by_role()["grad"]
    to_device = [m for m in found.transfers.moves if m.kind == FROM_HOST]
    # A number for each slice of a parameter puts loops in turn on simulated devices.
    numbers = [m for m in to_device if m.purpose == HOST_UPDATE]
    assert len(numbers) <= len(program.table)
    assert all(m.elements == 1 and m.runs <= FEWEST for m in numbers)
    size = grads // (2 if precision else 1)
    assert size <= back + found.by_kind[GRADIENTS][1] <= 1.1 * size


def test_a_parameter_that_the_host_does_not_write_is_an_error(monkeypatch):
    config = BF16 | offloaded(3, "param", "optimizer")
    config["zero_optimization"]["offload_optimizer"]["where"] = "host"
    monkeypatch.setattr(_TransferCounter, "written", lambda self: frozenset())
    with pytest.raises(JaxspeedError, match="is offloaded, but is never copied from the device"):
        moved(config)


def _row_bytes(program, role):
    """(row, bytes of a device, of four bytes an element, sharded as this role is)."""
    for row in program.table:
        placement = getattr(row, role)
        shape = program.table.sharding(placement).shard_shape(row.shape(placement))
        yield row, 4 * int(np.prod(shape))


def test_what_the_host_should_update_and_does_not_is_an_error():
    config = offloaded(0, "optimizer")
    program = program_of(config)
    config["zero_optimization"]["offload_optimizer"]["where"] = "host"
    asked = program_of(config)
    batch = program.abstract_batch(
        {"tokens": jax.ShapeDtypeStruct((program.batch.train, SEQ + 1), np.int32)}
    )
    step = dataclasses.replace(read_step(program, batch), program=asked)
    with pytest.raises(JaxspeedError, match="should be updated by the host's cores, and is not"):
        transfer_in(step)


def test_what_stages_save_is_offloaded():
    config = {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 4}
    _, found = moved(config | ON_HOST, devices=2)
    assert set(found.by_kind) == {ACTIVATIONS}


def moved(config, devices=4):
    program = program_of(config, devices)
    tokens = jax.ShapeDtypeStruct((program.batch.train, SEQ + 1), np.int32)
    batch = program.abstract_batch({"tokens": tokens})
    return program, transfer_of(program, batch)


@pytest.mark.parametrize(
    ("accumulation", "stage"),
    covering(itertools.product([1, 3], [0, 1, 3]), [(1, 0), (3, 3)]),
)
def test_masters_and_moments_cross_once_a_step_whatever_the_accumulation(stage, accumulation):
    config = {"gradient_accumulation_steps": accumulation}
    program, found = moved(BF16 | offloaded(stage, "optimizer") | config)
    waiting = program.table.host_bytes_by_role()
    bytes_ = waiting["master"] + waiting["opt"]
    assert found.by_kind.keys() == {OPTIMIZER}
    there, back = found.by_kind[OPTIMIZER]
    assert back == bytes_
    # On simulated devices one number of each parameter puts the loops over them in turn.
    assert 0 < there - bytes_ <= 4 * len(program.table)


@pytest.mark.parametrize(
    ("stage", "accumulation"), covering(itertools.product([0, 2], [1, 3]), [(0, 3), (2, 1)])
)
def test_saved_activations_cross_once_there_and_once_back_in_each_micro_batch(stage, accumulation):
    config = {"gradient_accumulation_steps": accumulation}
    _, found = moved(BF16 | ON_HOST | offloaded(stage) | config)
    inputs = accumulation * LAYERS * MICRO * SEQ * EMBED * 2
    assert found.by_kind == {ACTIVATIONS: (inputs, inputs)}


def test_a_share_of_each_saved_activation_crosses():
    keys = {**ON_HOST["activation_checkpointing"], "cpu_checkpointing_ratio": 0.25}
    _, found = moved(BF16 | {"activation_checkpointing": keys} | offloaded(3))
    share = LAYERS * MICRO * SEQ * EMBED * 2 // 4
    assert found.by_kind == {ACTIVATIONS: (share, share)}


def test_what_a_budget_lacks_of_the_units_inputs_crosses():
    inputs = LAYERS * MICRO * SEQ * EMBED * 2
    _, found = moved(BF16 | {"parallel": {"remat": {"budget": inputs // 2}}} | offloaded(1))
    there, back = found.by_kind[ACTIVATIONS]
    assert there == back
    assert inputs // 2 <= there <= inputs // 2 + inputs // 8


def test_parameters_come_for_each_pass_and_gradients_leave_once():
    program, found = moved(BF16 | offloaded(3, "param"))
    waiting = program.table.host_bytes_by_role()
    param, grad = waiting["param"], waiting["grad"]
    # Twice, but what is read at several places (the table, by its head too) once, for all of them.
    table = 2 * SMALL.vocab_size * EMBED // 4
    # The backward pass reads no bias, and no position.
    forward = ("bias", "positions/table")
    once = sum(n // 2 for row, n in _row_bytes(program, "param") if row.path.endswith(forward))
    assert found.by_kind[PARAMETERS][0] == 2 * param - table - once
    assert grad // 2 <= found.by_kind[GRADIENTS][1] <= 2 * grad


def test_an_activation_that_looks_like_a_weight_is_not_taken_for_its_gradient():
    """8 samples of 8 features, and weights of 8 x 8."""
    plain = {"train_micro_batch_size_per_gpu": 8}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    config = plain | adam | ON_HOST | offloaded(0, "param")
    program = build_program(Config.load(config), PAIR, squared_error, devices=jax.devices()[:1])
    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(8))
    found = transfer_of(program, data)
    inputs = found.by_kind[ACTIVATIONS]
    assert inputs[0] == inputs[1] > 0
    assert found.by_kind[GRADIENTS][1] > 0


@pytest.mark.sampled
@pytest.mark.parametrize("way", covering(["stage 0", "stage 3", "sequence"], ["sequence"]))
def test_its_flops_are_those_of_the_compiled_step(way):
    """Products; also where not all devices share them."""
    sequence = {"mesh": {"tensor": 2}, "parallel": {"sequence_parallel_activations": True}}
    ways = {"stage 0": offloaded(0), "stage 3": offloaded(3), "sequence": sequence}
    program, found = moved(ON_HOST | ways[way])
    tokens = jax.ShapeDtypeStruct((program.batch.train, SEQ + 1), np.int32)
    compiled = program.step.lower(program.state, program.abstract_batch({"tokens": tokens}))
    assert found.flops == report(compiled.compile(), program.mesh).flops


def test_a_parameter_that_the_loss_does_not_read_is_not_fetched():
    """It is made of its master."""

    def init(key):
        return {**init_pair(key), "unused": jax.numpy.ones((8, 8))}

    plain = {"train_micro_batch_size_per_gpu": 4}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    config = Config.load(plain | adam | BF16 | offloaded(0, "param"))
    program = build_program(config, (init, apply_pair), squared_error, devices=jax.devices()[:1])
    transfers = transfer_of(program, batch(4)).transfers
    assert "params/unused" not in transfers.fetched
    assert transfers.stored["params/unused"] == 8 * 8 * 2


def test_without_host_transfers_nothing_is_reported():
    assert moved(BF16 | {"parallel": {"remat": "full"}})[1] is None
    assert moved(BF16)[1] is None


# -- what does nothing ---------------------------------------------------------------------------


def keep_where_it_is(monkeypatch):
    for move in ("store", "fetch"):
        monkeypatch.setattr(ResidualPolicy, move, lambda self, saved, kinds: list(saved))


def test_activations_that_stay_are_an_error(monkeypatch):
    keep_where_it_is(monkeypatch)
    with pytest.raises(JaxspeedError, match="cpu_checkpointing: no activation is copied to host"):
        moved(ON_HOST)


def test_named_activations_that_stay_are_an_error(monkeypatch):
    monkeypatch.setattr(
        "jaxspeed.remat.resolve.names_policy",
        lambda save, offload: jax.checkpoint_policies.save_only_these_names(*save, *offload),
    )
    with pytest.raises(JaxspeedError, match=r'{"offload".*: no activation is copied to host'):
        moved({"parallel": {"remat": {"offload": ["attention"]}}})


def test_remat_without_offload_is_checked_before_shardings_are_propagated(monkeypatch):
    """Propagation took as long as the check: only bytes in host memory need it."""
    monkeypatch.setattr("jaxspeed.planner.trace.traced_step.propagate_shardings", None)
    assert moved({"parallel": {"remat": "full"}})[1] is None
    with pytest.raises(TypeError):
        moved({"parallel": {"remat": {"offload": ["attention"]}}})


def test_what_is_saved_in_spite_of_remat_is_an_error(monkeypatch):
    monkeypatch.setattr(ResidualPolicy, "rematerialized", lambda self, fn, in_loop: fn)
    with pytest.raises(JaxspeedError, match=r"parallel\.remat: remat had no effect"):
        moved({"parallel": {"remat": "full"}})


def test_offloaded_state_that_is_not_fetched_is_an_error(monkeypatch):
    program = program_of(offloaded(0, "optimizer"))
    batch = program.abstract_batch(
        {"tokens": jax.ShapeDtypeStruct((program.batch.train, SEQ + 1), np.int32)}
    )
    vars(program)["step"] = jax.jit(lambda state, batch: (state, {}))
    with pytest.raises(JaxspeedError, match="is offloaded, but is never copied to the device"):
        transfer_of(program, batch)


def test_a_compiler_that_left_state_on_the_device_is_reported():
    program = program_of(offloaded(0, "optimizer") | ON_HOST)
    check_host_bytes(program, 0, 0)  # a CPU reports nothing

    class Tpu:
        platform, device_kind = "tpu", "TPU v5p"

    mesh = dataclasses.make_dataclass("Mesh", ["devices"])(np.array([Tpu()]))
    seen = dataclasses.make_dataclass("Program", ["mesh", "table", "config"])(
        mesh, program.table, program.config
    )
    waiting = sum(program.table.host_bytes_by_role().values())
    check_host_bytes(seen, waiting, 1)
    with pytest.raises(JaxspeedError, match=f"{waiting} bytes of state, of which only 10 are"):
        check_host_bytes(seen, 10, 1)
    with pytest.raises(JaxspeedError, match="saved activations, of which none are"):
        check_host_bytes(seen, waiting, 0)


# -- the engine ----------------------------------------------------------------------------------


def trained(config, monkeypatch=None):
    plain = {"train_micro_batch_size_per_gpu": 4}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    engine = jaxspeed.initialize(
        PAIR, squared_error, plain | adam | config, devices=jax.devices()[:1]
    )
    return engine, batch(4)


def test_the_first_step_is_checked_before_it_runs(monkeypatch):
    engine, data = trained(ON_HOST)
    keep_where_it_is(monkeypatch)
    with pytest.raises(JaxspeedError, match="bug in jaxspeed"):
        engine.train_batch(data)


def test_a_slow_link_is_warned_of_before_the_first_step(monkeypatch, caplog):
    engine, data = trained(offloaded(0, "optimizer"))
    with caplog.at_level(logging.WARNING, "jaxspeed"):
        engine.train_batch(data)
    assert not [r for r in caplog.records if "offload" in r.message], "of a CPU nothing is known"
    monkeypatch.setattr("jaxspeed.offload.transfer_report.TransferReport.is_known", True)
    monkeypatch.setattr("jaxspeed.offload.transfer_report.TransferReport._rated", "TPU v5p")
    engine, data = trained(offloaded(0, "optimizer"))
    with caplog.at_level(logging.WARNING, "jaxspeed"):
        engine.train_batch(data)
    (record,) = [r for r in caplog.records if "offload" in r.message]
    assert "100% of the bytes are optimizer" in record.message
    assert "the link and peak of TPU v5p" in record.message


@pytest.mark.parametrize("remat", covering(["full", {"budget": "1kB"}, "names"], ["full"]))
def test_where_only_what_follows_the_units_is_trained_there_is_nothing_to_recompute(remat):
    remat = {"save": ["attention"]} if remat == "names" else remat
    program, _ = moved({"parallel": {"remat": remat}, "trainable": ["norm/**"]})
    assert [row.path for row in program.table if row.leaf.trainable]
