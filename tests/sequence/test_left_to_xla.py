"""What XLA exchanges over `seq` besides attention: nothing it need not, and the report of the rest.

Each constraint that keeps it so is needed: dropped, a check fails.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxspeed
from jaxspeed.hlo.cost import cost
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.sequence_exchanges import sequence_exchanges
from jaxspeed.ops.attention_call import SEQUENCE_SCOPE
from jaxspeed.placement.constrain import constrain
from jaxspeed.tensor_parallel import insert_constraints
from jaxspeed.zero3 import sharded_param, table_lookup
from tests.sequence import test_shard_sequence as models
from tests.sequence.programs import Sharded, mesh_of

SEQ, WIDTH = 512, 64
SIZES = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}


def gathered() -> list[int]:
    """The sizes of the activations that a step of a small Llama under ZeRO 3 gathers over `seq`.

    Without attention's. All are larger than the largest parameter.
    """
    config = {
        "model": {"family": "llama", "preset": "tiny", "config": SIZES},
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "mesh": {"data": 2, "seq": 2, "tensor": 2},
        "parallel": {"sequence_parallel_activations": True},
    }
    engine = jaxspeed.initialize(config=config)
    report = engine.compiled({"tokens": np.zeros((2, SEQ + 1), np.int32)})
    return [
        one.elements
        for one in report.collectives
        if one.kind == "all-gather"
        and "seq" in one.axes
        and one.dtype == "f32"
        and one.elements > SIZES["vocab_size"] * WIDTH
        and SEQUENCE_SCOPE not in one.site
    ]


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Any:
    def drop(module: Any, name: str) -> None:
        def without(x: Any, sharding: Any, site: str) -> Any:
            return x if site == name else constrain(x, sharding, site)

        monkeypatch.setattr(module, "constrain", without)

    return drop


@pytest.mark.sampled
def test_no_activation_is_gathered_but_by_attention():
    assert gathered() == []


@pytest.mark.sampled
def test_without_their_sum_gradients_gather_what_they_are_sums_of(dropped):
    dropped(sharded_param, "unit.sum")
    assert gathered()


@pytest.mark.sampled
def test_without_a_step_by_positions_a_lookup_is_gathered(dropped):
    dropped(table_lookup, "lookup.positions")
    assert gathered()


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
        ("cumulative sum", "reduce_window_sum", "jnp.cumsum("),
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
