"""What one may write for a target, and what is said of the rest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.errors import ConfigError
from jaxspeed.hardware.known_chips import chips_of, speeds_table
from jaxspeed.hardware.targets import target_of
from jaxspeed.placement.show import as_text

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("written", "count", "topology", "slices", "node"),
    [
        ("cpu:8", 8, (), 1, 8),
        ("v5e:4x4", 16, (4, 4), 1, 4),
        ("v5e:1x1", 1, (1, 1), 1, 1),
        ("v5p:8x8x16", 1024, (8, 8, 16), 1, 4),
        ("v6e:16x16", 256, (16, 16), 1, 4),
        ("v4:2x2x2", 8, (2, 2, 2), 1, 4),
        ("tpu7x:4x4x4", 128, (4, 4, 4), 1, 8),
        ("2x v5p:4x4x4", 128, (4, 4, 4), 2, 4),
        ("2xv5p:4x4x4", 128, (4, 4, 4), 2, 4),
        ("h100:64", 64, (), 1, 8),
        ("h100:64/4", 64, (), 1, 4),
        ("H100:4", 4, (), 1, 4),
        ("a100-40g:1", 1, (), 1, 1),
        ("b200:72/72", 72, (), 1, 72),
    ],
)
def test_a_target_is_read(written, count, topology, slices, node):
    target = target_of(written)
    assert (target.count, target.topology, target.slices) == (count, topology, slices)
    assert target.node == node
    assert target_of(str(target)) == target


MISTAKES = {
    "": "Needs CHIP:COUNT",
    "v5e:-4x4": "Needs CHIP:COUNT",
    "h101:8": 'Did you mean "h100"?',
    "a100:8": "It is one of a100-40g, a100-80g",
    "h100": "as in h100:8",
    "h100:0": "a size of zero",
    "h100:4x4": "as in h100:16",
    "2x h100:8": "as in h100:16",
    "h100:64/7": "nodes of 1, 2, 4, 8, 16, 32, 64 would do",
    "h100:64/0": "not divisible into nodes of 0",
    "v5p:8": "8 chips are v5p:2x2x2",
    "v5p": "for example v5p:2x2x1",
    "v5p:4x4": "v5p:4x4x1",
    "v5e:4x4x4": "64 chips are v5e:8x8",
    "v5e:32x32": "for several slices write 2x v5e:16x16",
    "v5p:3x3x3": "the first two dims must be even",
    "v5p:4x4x4/4": "devices per node are for GPUs",
    "0x v5p:4x4x4": "a size of zero",
    "cpu:1000000": "at most 65536",
}


@pytest.mark.parametrize("written", MISTAKES)
def test_a_mistake_is_reported_with_what_would_work(written):
    with pytest.raises(ConfigError) as told:
        target_of(written)
    assert MISTAKES[written] in str(told.value)


def test_what_an_error_suggests_is_a_target():
    for written in ("v5p:8", "v5p:4x4", "v5e:64", "v5p:3x3x3", "v6e:12"):
        with pytest.raises(ConfigError) as told:
            target_of(written)
        chip = written.split(":")[0]
        words = str(told.value).replace(",", " ").split()
        shapes = [word for word in words if word.startswith(f"{chip}:")]
        assert shapes and all(target_of(shape) for shape in shapes)


@given(st.text(max_size=20) | st.from_regex(r"(\d+x )?(v5p|v5e|h100|cpu):[0-9x/]{0,8}"))
def test_any_text_is_a_target_or_one_clear_error(written):
    try:
        target = target_of(written)
    except ConfigError as error:
        assert str(error).startswith("target: ")
    else:
        assert target.count >= 1 and target_of(str(target)) == target


@pytest.mark.parametrize(
    ("written", "closed"),
    [
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x2x4", (False, False, False)),  # no whole cube
        ("v5e:8x16", (False, True)),
        ("v6e:4x4", (False, False)),
        ("h100:8", ()),
    ],
)
def test_which_dims_of_a_torus_are_closed(written, closed):
    assert target_of(written).wraps == closed


def test_simulated_devices_share_the_memory_of_the_machine():
    one, eight = target_of("cpu:1").chip.memory, target_of("cpu:8").chip.memory
    assert eight == one // 8 and one > 10**9


def test_a_slice_has_its_part_of_the_devices():
    target = target_of("4x v5e:4x4")
    assert target.slice_count * target.slices == target.count == 64
    assert math.prod(target.topology) == target.slice_count


def test_a_hardware_file_adds_chips_and_changes_known_ones(tmp_path):
    text = (
        "{name}:\n  platform: cuda\n  kinds: [X]\n  memory: 7 GB\n  flops: {{bf16: 1T, fp32: 1T}}\n"
        "  bandwidth: 1 GB/s\n  link: 1 GB/s\n  links: 1\n  outside: 1 GB/s\n  host_link: 1 GB/s\n"
        "  host_memory: 1 GB\n  node: 2\n"
    )
    path = tmp_path / "own.yaml"
    path.write_text(text.format(name="mine") + text.format(name="h100"))
    chips = chips_of(path)
    assert target_of("mine:4", chips).node == 2
    assert target_of("h100:4", chips).chip.memory == 7 * 10**9
    assert target_of("h100:4").chip.memory > 70 * 10**9


def test_the_table_of_targets_fits_80_columns_and_names_each():
    shown = as_text(speeds_table(chips_of()), width=80)
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    for name, chip in chips_of().items():
        row = rows[name + ("" if chip.compiles else "*")]
        assert float(row[3]) == pytest.approx(chip.memory / 1e9, rel=0.01)
