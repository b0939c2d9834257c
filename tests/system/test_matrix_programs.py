"""Muon's and SOAP's steps of 8 B parameters: a device's share of the work, and what is sent."""

import functools
import importlib.util
from typing import Any

import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile import in_child
from tests.support.topology import run_on_topology
from tests.system.matrix_programs import LAYERS, MATRICES, program
from tests.system.measured import collectives_of, measure_on_gpus


def gram_flops(rows: int, columns: int) -> int:
    """Of DeepSpeed's Gram iteration: 2 + 3 quintics, each part applied to the matrix once.

    Of a square matrix, of five quintics: a square, its square, and a product.
    """
    small, large = sorted((rows, columns))
    if small == large:
        return 5 * 3 * 2 * small**3
    of_gram = 2 * (2 + 3) + 2 * (1 + 2) + 4 * (1 + 2)  # squares, products Q, both sides of R
    return 2 * (2 * small**2 * large * 2) + of_gram * small**3


def check(found: dict[str, Any], usual: dict[str, Any], ranks: int) -> None:
    """Compare a step of Muon with one of AdamW."""
    share = {(m, n): -(-LAYERS * count // ranks) for m, n, count in MATRICES}
    flops = sum(count * gram_flops(*shape) for shape, count in share.items())
    assert found["owners_flops"] == pytest.approx(flops, rel=0.01)
    assert sent(found, usual) == pytest.approx(2 * 2 * padded(share), rel=0.03)
    assert found["temp_bytes"] <= 1.05 * usual["temp_bytes"]


def padded(share: dict[tuple[int, int], int]) -> int:
    """Elements of a device: of all matrices of each shape, padded to as many of each."""
    return sum(count * m * n for (m, n), count in share.items())


def sent(found: dict[str, Any], usual: dict[str, Any]) -> int:
    """Bytes of the all-to-alls that AdamW's step has not."""
    ours, theirs = (
        sum(c.payload for c in collectives_of(x) if c.kind == "all-to-all") for x in (found, usual)
    )
    return ours - theirs


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 8])
def test_muon_on_64_chips(tensor):
    found, usual = (
        run_on_topology(
            "tests.system.matrix_programs:step", "v5p:4x4x4", optimizer=name, tensor=tensor
        )
        for name in ("Muon", "AdamW")
    )
    check(found, usual, 64)
    assert found["planned"] - usual["planned"] == pytest.approx(found["roofline"], rel=0.25)


@pytest.mark.full
@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, in_child.CUDA_PLUGINS)),
    reason="needs jax[cuda13] (3.4 GB) to compile for a GPU",
)
def test_muon_and_soap_on_eight_gpus():
    muon, soap, usual = (
        measure_on_gpus(target_of("h100:8"), functools.partial(program, optimizer=name, micro=1))
        for name in ("Muon", "SOAP", "AdamW")
    )
    check(muon, usual, 8)
    share = {(m, n): LAYERS * count // 8 for m, n, count in MATRICES}
    assert sent(soap, usual) == pytest.approx(2 * 4 * padded(share), rel=0.03)
    assert soap["temp_bytes"] <= 1.05 * usual["temp_bytes"]
    sides = sum(n * sum(side <= 10_000 for side in shape) for shape, n in share.items())
    assert soap["decompositions"] == {"qr": sides, "eigh": sides}
