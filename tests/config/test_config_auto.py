"""Values for "auto": the caller's, the config's, Hugging Face's, DeepSpeed's; the rest is asked."""

import json

import pytest

from jaxspeed.config import Config, examine, explain_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

# The example for ZeRO 3 in Hugging Face's documentation.
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
KNOWN = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer.params.lr": 5e-5,
    "scheduler.params.total_num_steps": 1000,
}


def test_the_preset_fills_in_hugging_faces_defaults():
    config = Config.load(HUGGING_FACE, auto={"preset": "hf", **KNOWN})
    assert config.optimizer.params["betas"] == (0.9, 0.999)
    assert config.optimizer.params["eps"] == 1e-8
    assert config.optimizer.params["weight_decay"] == 0
    assert config.gradient_clipping == 1
    assert config.scheduler.params["warmup_min_lr"] == 0
    assert config.scheduler.params["warmup_num_steps"] == 0
    assert config.scheduler.params["warmup_max_lr"] == config.optimizer.params["lr"] == 5e-5
    assert config.scheduler.params["total_num_steps"] == 1000
    assert (config.fp16.enabled, config.bf16.enabled) == (False, True)
    assert config.zero_optimization.stage3_param_persistence_threshold == 100_000
    assert config.batch(4).train == 32


def test_values_may_be_options_of_the_command_line():
    options = ["hf", *(f"{path}={value}" for path, value in KNOWN.items())]
    assert Config.load(HUGGING_FACE, auto=options) == Config.load(
        HUGGING_FACE, auto={"preset": "hf", **KNOWN}
    )


@pytest.mark.parametrize(
    ("precision", "platform", "fp16", "bf16"),
    [
        ({"bf16": "auto", "fp16": "auto"}, "tpu", False, True),
        ({"bf16": "auto", "fp16": "auto"}, "gpu", False, True),
        ({"bf16": "auto", "fp16": "auto"}, "cpu", False, False),
        ({"fp16": "auto"}, "gpu", True, False),
        ({"fp16": "auto"}, "tpu", False, False),
        ({"fp16": True, "bf16": "auto"}, "tpu", True, False),
        ({"fp16": "auto", "bf16": True}, "cpu", False, True),
    ],
)
def test_the_preset_chooses_the_precision_by_platform(precision, platform, fp16, bf16):
    tree = {name: {"enabled": value} for name, value in precision.items()}
    config = Config.load(tree, auto="hf", platform=platform)
    assert (config.fp16.enabled, config.bf16.enabled) == (fp16, bf16)


def test_the_platform_of_the_run_decides_if_none_is_passed():
    tree = {"bf16": {"enabled": "auto"}, "run": {"devices": "cpu:8"}}
    assert not Config.load(tree, auto="hf").bf16.enabled


def test_what_only_the_user_knows_is_asked_for_in_one_error():
    with pytest.raises(ConfigError) as caught:
        Config.load(HUGGING_FACE)
    message = str(caught.value)
    advice = message.splitlines()[-1]
    assert advice.startswith("Add --auto hf --auto ")
    options = advice.partition("Add ")[2].partition(" to the command")[0].split("--auto ")[1:]
    assert {option.strip() for option in options} == {
        "hf", "train_micro_batch_size_per_gpu=8", "optimizer.params.lr=5e-05",
        "scheduler.params.total_num_steps=1000",
    }  # fmt: skip
    mapping = json.loads(advice.partition("auto=")[2].partition(" to jaxspeed")[0])
    # The lines load as they are.
    assert Config.load(HUGGING_FACE, auto=[option.strip() for option in options])
    assert Config.load(HUGGING_FACE, auto=mapping)


def test_the_preset_alone_still_asks_for_batch_rate_and_steps():
    with pytest.raises(ConfigError) as caught:
        Config.load(HUGGING_FACE, auto="hf")
    paths = {line[4:].partition(": ")[0] for line in str(caught.value).splitlines()[1:-1]}
    assert paths == {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "optimizer.params.lr", "scheduler.params.warmup_max_lr",
        "scheduler.params.total_num_steps",
    }  # fmt: skip
    assert "never guessed" in str(caught.value)
    assert "Remove the key" not in str(caught.value)


def test_no_message_about_a_batch_size_points_to_itself():
    for problem in examine(HUGGING_FACE).problems:
        assert f"resolved from {problem.path}" not in problem.works


def test_a_value_that_the_config_contradicts_is_an_error():
    with pytest.raises(ConfigError, match="found 4 by auto, while the config has 8"):
        Config.load({"train_batch_size": 8}, auto={"train_batch_size": 4})
    assert Config.load({"train_batch_size": 8}, auto={"train_batch_size": 8})
    assert Config.load({}, auto={"train_batch_size": 8}).train_batch_size == 8


@pytest.mark.parametrize("auto", ["hff", {"preset": "HF"}, {"train_batch_sise": 8}, ["a..b=1"]])
def test_a_wrong_auto_is_an_error(auto):
    with pytest.raises(ConfigError):
        Config.load({"train_batch_size": 8}, auto=auto)


def test_what_was_filled_in_is_explained_with_its_source():
    rows = {row.key: row for row in explain_config(HUGGING_FACE, auto={"preset": "hf", **KNOWN})}
    ends = {
        "train_micro_batch_size_per_gpu": "Here: 8, from auto.",
        "optimizer.params.betas": "Here: [0.9, 0.999], from Hugging Face's default.",
        "scheduler.params.warmup_max_lr": "Here: 5e-05, from optimizer.params.lr.",
        "zero_optimization.reduce_bucket_size": "Here: its default, as in DeepSpeed.",
    }
    for path, end in ends.items():
        assert rows[path].sentence.endswith(end)


def test_a_filled_config_is_written_without_auto():
    config = Config.load(HUGGING_FACE, auto={"preset": "hf", **KNOWN})
    assert '"auto"' not in json.dumps(config.given)
    assert Config.load(config.given) == config
    assert config.model_copy(update={"steps_per_print": 5}).optimizer == config.optimizer


def test_a_problem_is_data():
    examined = examine(HUGGING_FACE | {"zero_optimization": {"stge": 3}}, auto={"preset": "hf"})
    paths = {problem.path for problem in examined.problems}
    assert "zero_optimization.stge" in paths
    assert examined.settings.zero_optimization.stage == 0
    assert examined.filled["gradient_clipping"].value == 1.0
    assert not examine(HUGGING_FACE, auto={"preset": "hf", **KNOWN}).problems
