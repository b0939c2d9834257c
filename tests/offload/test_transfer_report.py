"""Times of host transfers and compute, and the warning."""

import pytest

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication
from jaxspeed.offload.transfer_report import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    HostTransfers,
    TransferReport,
)
from jaxspeed.placement.show import as_text


def transfer(to_device, to_host, flops, kind="TPU v5p"):
    moves = [
        Communication(way, (), size, 1, "trace", purpose=purpose)
        for way, sizes in ((FROM_HOST, to_device), (TO_HOST, to_host))
        for purpose, size in sizes.items()
    ]
    return TransferReport(HostTransfers(moves, {}), kind, flops)


def test_the_times_are_bytes_over_the_link_and_flops_over_the_peak():
    one = transfer({PARAMETERS: 48e9}, {GRADIENTS: 16e9}, 459e12)
    assert one.seconds == (48e9 + 16e9) / 16e9
    assert one.compute_seconds == 1
    text = as_text(one, 80)
    assert "transfers 4 s = 64 GB (traced step) / 16 GB/s" in text
    assert "compute 1 s = 459 Tflop (estimated from the traced step) / 459 Tflop/s" in text
    assert "lower bounds, with the link and peak of TPU v5p" in text


def test_the_compilers_flops_replace_the_estimate():
    one = transfer({OPTIMIZER: 1}, {}, 5.0).counted(7)
    assert (one.flops, one.flops_from) == (7, "as compiled")
    assert one.counted(None) is one


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (OPTIMIZER, "gradient_accumulation_steps"),
        (PARAMETERS, "train_micro_batch_size_per_gpu"),
        (GRADIENTS, "train_micro_batch_size_per_gpu"),
        (ACTIVATIONS, "parallel.remat"),
    ],
)
def test_where_transfers_take_longer_the_warning_has_the_cause_and_a_remedy(kind, advice):
    others = dict.fromkeys((OPTIMIZER, PARAMETERS, GRADIENTS, ACTIVATIONS), 1000000000.0)
    slow = transfer({**others, kind: 60e9}, {}, 459e12)
    assert slow.warning and f"% of the bytes are {kind}" in slow.warning
    assert advice in slow.warning
    assert "3.9 times as long" in slow.warning


def test_where_compute_takes_longer_there_is_no_warning():
    assert transfer({OPTIMIZER: 1e9}, {}, 459e12).warning is None


def test_unknown_devices_get_the_figures_of_a_named_one():
    one = transfer({OPTIMIZER: 32e9}, {}, 312e12, kind="cpu")
    assert not one.is_known
    assert (one.seconds, one.compute_seconds) == (1, 1)
    assert "A100 (this device's link is unknown)" in str(one)
    assert one.figures()["as_on"] == "A100"


def test_the_figures_are_plain():
    one = transfer({OPTIMIZER: 32}, {PARAMETERS: 16}, 459e12)
    assert one.figures()["to_device"] == {OPTIMIZER: 32}
    assert one.figures()["to_host"] == {PARAMETERS: 16}
    assert set(map(type, one.figures().values())) <= {dict, float, int, str, type(None)}
