"""What XLA exchanges over `seq` besides attention: nothing it need not, and the report of the rest.

Each constraint that keeps it so is needed: dropped, a check fails.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.hlo.cost import cost
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.sequence_exchanges import sequence_exchanges
from jaxspeed.placement.constrain import constrain
from jaxspeed.tensor_parallel import insert_constraints
from jaxspeed.zero3 import sharded_param, table_lookup
from tests.sequence import test_shard_sequence as models
from tests.sequence.programs import Sharded, mesh_of

WIDTH, SEQ, VOCAB = 16, 256, 24


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class PerToken(nnx.Module):
    """A model in which no token sees another one."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"][:, :-1])
    targets = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def compiled(stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "mesh": {"data": 2, "seq": 2},
    }
    engine = jaxspeed.initialize(PerToken, loss, config, devices=jax.devices()[:4])
    return engine.compiled({"tokens": np.zeros((2, SEQ + 1), np.int32)})


def activations(report: Any) -> set[str]:
    """The kinds of collectives over `seq` of at least a device's positions x features.

    ZeRO's are smaller: no parameter has as many elements.
    """
    return {
        one.kind
        for one in report.collectives
        if "seq" in one.axes and one.elements >= SEQ * WIDTH // 2 and one.dtype == "f32"
    }


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Any:
    def drop(module: Any, name: str) -> None:
        def without(x: Any, sharding: Any, site: str) -> Any:
            return x if site == name else constrain(x, sharding, site)

        monkeypatch.setattr(module, "constrain", without)

    return drop


def test_a_model_of_single_tokens_gathers_no_activation():
    found = compiled(3)
    assert found.over_sequence == ()
    assert activations(found) == {"all-to-all"}  # the looked-up columns


def test_without_their_sum_gradients_gather_what_they_are_sums_of(dropped):
    dropped(sharded_param, "unit.sum")
    assert "all-gather" in activations(compiled(3))


def test_without_a_step_by_positions_a_lookup_is_gathered(dropped):
    dropped(table_lookup, "lookup.positions")
    assert "all-gather" in activations(compiled(3))


def flops() -> int:
    made = models.CASES["dropout"]()
    text = Sharded(made.loss, made.params, made.batch, mesh_of(seq=4)).compiled.as_text()
    return cost(parse(text)).flops


def test_without_constraints_all_devices_compute_the_sequence(dropped):
    kept = flops()
    dropped(insert_constraints, "sequence")
    assert flops() >= 3 * kept


@pytest.mark.parametrize(
    ("name", "operation", "line"),
    [
        ("state-space scan", "a scan", "lax.scan("),
        ("depthwise convolution", "conv_general_dilated", "conv_general_dilated"),
    ],
)
def test_the_report_names_operation_line_and_bytes(name, operation, line):
    made = models.CASES[name]()
    sharded = Sharded(made.loss, made.params, made.batch, mesh_of(seq=4))
    sizes = {x.size for x in made.params.values()}
    first, *_ = sequence_exchanges(sharded.compiled.as_text(), sharded.mesh, sizes)
    assert first.operation == operation
    file, _, number = first.line.partition(":")
    source = Path(models.__file__).read_text().splitlines()
    assert Path(models.__file__).name == file
    assert line in source[int(number) - 1]
    if operation == "a scan":
        assert first.bytes == 4 * models.BATCH * models.SEQ * models.WIDTH
        assert str(first).startswith(f"a scan at {file}:{number} gathers 4.1 kB, ")


def test_without_an_axis_nothing_is_reported():
    assert sequence_exchanges("", mesh_of(data=2), ()) == ()
