"""A plan's bytes of state on a disk are those of the file, and of what a step transfers."""

import os

import pytest

from jaxspeed.disk.measure import disk_rate, measure_disk
from jaxspeed.errors import ConfigError
from jaxspeed.planner.plan import Plan
from tests.disk.disk_models import batch_of, engine, program

BF16 = {"bf16": {"enabled": True}}
EIGHT_BIT = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}, "width": 72}
CONFIGS = {
    "bf16": {**BF16},
    "fp32": {"stage": 1, "mesh": {"data": 2}},
    "stage 3": {"stage": 3, "mesh": {"data": 2, "tensor": 2}, **BF16},
    "8 bits": {"stage": 2, "mesh": {"data": 2}, **EIGHT_BIT},
}


@pytest.mark.default_cases("stage 3")
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_the_file_and_of_a_step(tmp_path, monkeypatch, name):
    made = program("nvme", tmp_path, **CONFIGS[name])
    figures = Plan(made, None, None, disk_rate=1e9).figures()
    started, batch = engine(made), batch_of(made.batch.train)
    moved = dict.fromkeys(("preadv", "pwritev"), 0)

    def counting(call):
        real = getattr(os, call)

        def counted(handle, buffers, offset):
            count = real(handle, buffers, offset)
            moved[call] += count
            return count

        return counted

    for call in moved:
        monkeypatch.setattr(os, call, counting(call))
    started.train_batch(batch)
    disk, (folder,) = figures["disk"], tmp_path.iterdir()
    assert disk["file_bytes"] == (folder / "state").stat().st_size
    assert disk["read_bytes_per_step"] == moved["preadv"]
    assert disk["written_bytes_per_step"] == moved["pwritev"]
    assert disk["buffer_bytes"] == 4 * max(bucket.nbytes for bucket in made.update.tier.buckets)
    assert disk["seconds_per_step"] == pytest.approx(2 * disk["file_bytes"] / 1e9)
    on_disk = sum(role["disk_bytes_per_device"] for role in figures["state"].values())
    assert 0 < on_disk <= disk["file_bytes"]


def test_without_a_speed_a_plan_has_no_seconds(tmp_path):
    made = program("nvme", tmp_path, **BF16)
    plan = Plan(made, None, None)
    assert plan.figures()["disk"]["seconds_per_step"] is None
    assert "read and written in each step;" in str(plan).replace("\n", " ")
    assert not [*tmp_path.iterdir()]
    assert Plan(program("none", **BF16), None, None).figures()["disk"] is None


def test_a_speed_is_a_number_or_measured(tmp_path):
    assert disk_rate("5GB/s") == 5e9 and disk_rate(" 1.5 MiB/s") == 1.5 * 2**20
    assert disk_rate(str(tmp_path)) is None
    for wrong in ("0GB/s", "5Gb/s", "5GBps", str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match="above 0"):
            disk_rate(wrong)
    assert not [*tmp_path.iterdir()]
    speed = measure_disk(tmp_path, 8 << 20)
    assert min(speed.read, speed.write, speed.both) > 1e5
    assert not [*tmp_path.iterdir()]
