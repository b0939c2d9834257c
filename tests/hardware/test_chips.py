"""The table of hardware: whole, sourced, and the same as what others publish."""

import math

import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.hardware import chip_of_kind, read_chips
from jaxspeed.hardware.chip import amount

pytestmark = pytest.mark.fast

CHIPS = read_chips()
FIGURES = ("memory", "flops", "bandwidth", "link", "outside", "host_link", "host_memory")
GIB = 1024**3
NEEDED = """
mine:
  platform: cuda
  kinds: [NVIDIA Mine]
  memory: 48 GB
  flops: {bf16: 100 TFLOP/s, fp32: 5.0e+13}
  bandwidth: 1 TB/s
  link: 32 GB/s
  links: 1
  outside: 10 GB/s
  host_link: 32 GB/s
  host_memory: 64 GiB
  node: 8
"""


def own(tmp_path, text=NEEDED, **changed):
    for key, value in changed.items():
        lines = text.splitlines()
        text = "\n".join(
            f"  {key}: {value}" if line.strip().startswith(f"{key}:") else line for line in lines
        )
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_has_its_source(name):
    assert all(CHIPS[name].sources[figure] for figure in FIGURES)


def test_the_chips_that_the_issue_names_are_there():
    asked = ["cpu", "v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "a100-80g", "a100-40g"]
    asked += ["b200", "v100-32g", "l4"]
    assert set(asked) <= set(CHIPS)
    assert not CHIPS["v100-32g"].compiles
    assert all(CHIPS[name].compiles for name in asked if name != "v100-32g")


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_tpus_are_as_jax_knows_them(name):
    """JAX's own table rounds; what a program may use is less than what there is."""
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    chip = CHIPS[name]
    version = info.chip_version_from_device_kind(chip.kind)
    core = info.get_tpu_info_for_chip(version, 1)
    cores = version.num_physical_tensor_cores_per_chip // chip.per_chip
    assert chip.flops["bf16"] == pytest.approx(core.bf16_ops_per_second * cores, rel=0.01)
    # Google's page says 2765 GB/s of v5p, JAX's table 2460.
    assert chip.bandwidth == pytest.approx(core.mem_bw_bytes_per_second * cores, rel=0.13)
    whole = core.hbm_capacity_bytes * cores
    assert 0.9 * whole < chip.memory <= whole


@pytest.mark.parametrize(
    ("name", "sold"),
    {"a100-40g": 40, "a100-80g": 80, "h100": 80, "h200": 141, "b200": 180, "l4": 24}.items(),
)
def test_of_a_gpu_nearly_all_that_is_sold_may_be_used(name, sold):
    """Makers' GB are of either size."""
    assert 0.9 * sold * 1e9 <= CHIPS[name].memory <= sold * GIB


def test_products_of_fp32_run_as_tf32_at_half_the_rate_of_bf16():
    for name in ("a100-40g", "a100-80g", "h100", "h200", "b200", "l4"):
        flops = CHIPS[name].flops
        assert flops["fp32"] == pytest.approx(flops["bf16"] / 2, rel=0.01)


def test_two_rows_never_claim_one_kind():
    kinds = [kind for chip in CHIPS.values() for kind in (chip.kind, *chip.kinds)]
    assert len(kinds) == len(set(kinds))
    for chip in CHIPS.values():
        if chip.platform != "cpu":
            assert chip_of_kind(chip.kind) == chip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("TPU v5 lite", "v5e"),
        ("NVIDIA L40S", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_the_words_of_its_kind(kind, name):
    assert chip_of_kind(kind) == (CHIPS[name] if name else None)


@pytest.mark.parametrize(
    ("written", "unit", "number"),
    [
        ("80 GB", "B", 80e9),
        ("1.5 GiB", "B", 1.5 * GIB),
        ("989.5 TFLOP/s", "FLOP/s", 989.5e12),
        ("400GB/s", "B/s", 400e9),
        (7, "B", 7.0),
        ("1e3", "B", 1000.0),
        ("80 GB", "B/s", None),
        ("80 XB", "B", None),
        ("-1 GB", "B", None),
        (True, "B", None),
        (None, "B", None),
    ],
)
def test_amounts_are_read_with_their_units(written, unit, number):
    assert amount(written, unit) == number


def test_a_user_s_own_chip_needs_no_sources_and_is_estimated(tmp_path):
    (chip,) = read_chips(own(tmp_path)).values()
    assert (chip.name, chip.memory, chip.flops["fp32"]) == ("mine", 48 * 10**9, 5e13)
    assert not chip.compiles and set(chip.sources) == set(FIGURES)


BAD = {
    "memory": ("0", "mine.memory: found 0. Needs more than 0, like 80 GB"),
    "bandwidth": ("-1 GB/s", "mine.bandwidth"),
    "link": (".nan", "mine.link"),
    "flops": ("{fp8: 1}", "Needs {bf16: ..., fp32: ...}"),
    "platform": ("gpu", "Needs tpu, cuda or cpu"),
    "node": ("0", "Needs an integer of at least 1"),
    "kinds": ("H100", "Needs a list"),
}


@pytest.mark.parametrize("key", BAD)
def test_a_bad_figure_is_reported_with_what_would_work(tmp_path, key):
    value, hint = BAD[key]
    with pytest.raises(ConfigError) as told:
        read_chips(own(tmp_path, **{key: value}))
    assert hint in str(told.value) and "1 problem" in str(told.value)


def test_all_problems_of_a_file_are_in_one_error(tmp_path):
    path = own(tmp_path, NEEDED.replace("memory: 48", "memry: 48", 1).replace("links: 1", "x: 1"))
    with pytest.raises(ConfigError) as told:
        read_chips(path)
    for part in ('mine.memry: an unknown key. Did you mean "memory"?', "mine.links: missing"):
        assert part in str(told.value)


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "mine: 3"])
def test_what_is_no_table_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="hardware file"):
        read_chips(own(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"hardware file .*No such file"):
        read_chips(tmp_path / "none.yaml")


def test_rates_are_of_the_size_that_hardware_has():
    for chip in CHIPS.values():
        assert chip.link <= chip.bandwidth and chip.outside < chip.link * chip.links
        assert all(math.isfinite(rate) for rate in chip.flops.values())
