"""What recomputation leaves of a step's memory, as TPUs compile it (XLA:CPU drops the barriers)."""

import random
from typing import Any

import pytest

from tests.support.topology import run_on_topology

pytestmark = pytest.mark.full  # minutes of compiling

# No kernel takes 960 tokens: compiling splash attention takes most of a minute. All inputs together
# are more than the 128 MiB of a core's own memory, whose bytes are not among the temporary ones.
EMBED, SEQ, MICRO = 1024, 960, 8
INPUT = MICRO * SEQ * EMBED * 2  # bytes of a block's input on a device, in bf16
SMALL: dict[str, Any] = {
    "sizes": {
        "hidden_size": EMBED,
        "num_attention_heads": 8,
        "vocab_size": 2048,
        "max_position_embeddings": SEQ,
    },
    "seq": SEQ,
    "micro": MICRO,
    "mixed": True,
}
SHALLOW, DEEP = 16, 32
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
WORDS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"parallel": {"remat": "full"}},
    "host": ON_HOST,
    "host, every 4": {**ON_HOST, "parallel": {"remat": {"every_n": 4}}},
    "every 4": {"parallel": {"remat": {"every_n": 4}}},
}


def test_llama3_8b_on_64_chips():
    """2 x 4096 tokens a device: 2.15 GB of the temporary bytes are the inputs of the blocks."""
    case = {
        "family": "llama",
        "preset": "llama3-8b",
        "stage": 3,
        "mixed": True,
        "seq": 4096,
        "micro": 2,
        "parallel": {"remat": "full"},
    }
    target = "tests.system.recompute_programs:figures_of"
    found = run_on_topology(target, "v5p:4x4x4", count=64, cases={"8b": case})["8b"]
    assert found["argument_bytes"] <= 1.55e9
    assert found["temp_bytes"] <= 4.4e9


@pytest.fixture(scope="module")
def stacks() -> dict[str, dict[str, int]]:
    cases = {
        f"{name}, {layers}": {
            **how,
            **SMALL,
            "stage": 0,
            "sizes": {**SMALL["sizes"], "num_hidden_layers": layers},
        }
        for name, how in WORDS.items()
        for layers in (SHALLOW, DEEP)
    }
    target = "tests.system.recompute_programs:figures_of"
    return run_on_topology(target, "v5p:2x2x1", count=1, cases=cases)


def growth(stacks: dict[str, dict[str, int]], name: str) -> float:
    """Bytes of temp that one more layer takes, beside its gradients."""
    deep, shallow = stacks[f"{name}, {DEEP}"], stacks[f"{name}, {SHALLOW}"]
    per_layer = (deep["temp_bytes"] - shallow["temp_bytes"]) / (DEEP - SHALLOW)
    return per_layer - deep["layer_grad_bytes"]


def test_full_keeps_one_input_a_layer(stacks):
    assert growth(stacks, "full") == pytest.approx(INPUT, rel=0.1)
    assert growth(stacks, "none") > 8 * INPUT, "without it a layer keeps much more"


def test_inputs_in_host_memory_leave_the_device(stacks):
    assert abs(growth(stacks, "host")) < 0.1 * INPUT


@pytest.mark.parametrize("layers", [SHALLOW, DEEP])
def test_what_waits_in_host_memory_is_the_inputs(stacks, layers):
    assert stacks[f"host, {layers}"]["host_temp_bytes"] == layers * INPUT
    assert stacks[f"host, every 4, {layers}"]["host_temp_bytes"] == layers // 4 * INPUT
    assert stacks[f"full, {layers}"]["host_temp_bytes"] == 0


def test_every_fourth_input_is_a_quarter_of_them(stacks):
    assert growth(stacks, "every 4") == pytest.approx(INPUT / 4, rel=0.1)


def test_what_is_saved_stays_within_ten_random_budgets():
    generator = random.Random(6)
    shares = sorted(generator.random() for _ in range(10))
    target = "tests.system.recompute_programs:budget_figures"
    sizes = {**SMALL["sizes"], "num_hidden_layers": SHALLOW}
    case = {**SMALL, "sizes": sizes, "stage": 0}
    found = run_on_topology(target, "v5p:2x2x1", shares=shares, **case)
    assert found["input_bytes"] == SHALLOW * INPUT
    kept = [
        (budget, temp - found["full"] + found["input_bytes"]) for budget, temp in found["budgets"]
    ]
    assert all(added <= budget for budget, added in kept), kept
    assert len({added for _, added in kept}) >= 4, "larger budgets keep more"


def test_attention_is_not_run_again_where_what_it_gives_is_kept():
    cases = {
        name: {**SMALL, "seq": 256, "parallel": {"remat": remat}}
        for name, remat in {
            "full": "full",
            "attention": "attention",
            "saved": {"save": ["attention"]},
        }.items()
    }
    sizes = {**SMALL["sizes"], "num_hidden_layers": SHALLOW}
    cases = {name: {**case, "sizes": sizes, "stage": 0} for name, case in cases.items()}
    found = run_on_topology("tests.system.recompute_programs:kernel_calls", "v5e:2x2", cases=cases)
    once = {"fwd": SHALLOW, "dq": SHALLOW, "dkv": SHALLOW}
    assert found["full"] == {**once, "fwd": 2 * SHALLOW}
    assert found["attention"] == once
    assert found["saved"] == once
