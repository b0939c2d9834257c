"""Values for "auto": the caller's, the config's, Hugging Face's, DeepSpeed's; the rest is asked."""

import json

import pytest

from jaxspeed.config import Config, examine, explain_config
from jaxspeed.config.explain import still_needed
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
SGD = {"type": "SGD", "params": {"lr": 0.1}}
TRAINED = {"optimizer": SGD, "scheduler": {"type": "WarmupLR"}}
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
    assert (config.fp16.enabled, config.bf16.enabled) == (False, False)
    assert config.zero_optimization.stage3_param_persistence_threshold == 100_000
    assert config.batch(4).train == 32


def test_values_may_be_options_of_the_command_line():
    options = ["hf", *(f"{path}={value}" for path, value in KNOWN.items())]
    assert Config.load(HUGGING_FACE, auto=options) == Config.load(
        HUGGING_FACE, auto={"preset": "hf", **KNOWN}
    )


@pytest.mark.parametrize(
    ("precision", "fp16", "bf16"),
    [
        ({"bf16": "auto", "fp16": "auto"}, False, False),
        ({"fp16": "auto"}, False, False),
        ({"fp16": True, "bf16": "auto"}, True, False),
        ({"fp16": "auto", "bf16": True}, False, True),
    ],
)
def test_the_presets_precision_is_hugging_faces(precision, fp16, bf16):
    tree = TRAINED | {name: {"enabled": value} for name, value in precision.items()}
    config = Config.load(tree, auto="hf")
    assert (config.fp16.enabled, config.bf16.enabled) == (fp16, bf16)
    open_flags = {f"{name}.enabled" for name, value in precision.items() if value == "auto"}
    notes = {note.partition(":")[0] for note in config.notes}
    assert notes == (open_flags if not (fp16 or bf16) else set())


# -- an optimizer and a schedule where the config has none -----------------------------------------

BATCH = {"train_micro_batch_size_per_gpu": 2}
ALONE = {"type": "WarmupDecayLR", "params": dict.fromkeys(
    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")}  # fmt: skip
WITHOUT_OPTIMIZER = {
    "plain": BATCH,
    "auto": {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
    "a scheduler alone": BATCH | {"scheduler": ALONE},
}
ASKED = {"optimizer.params.lr": 1e-3, "scheduler.params.total_num_steps": 10}


@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_the_preset_adds_the_trainers_optimizer_and_schedule(name):
    known = ASKED | (BATCH if name == "auto" else {})
    config = Config.load(WITHOUT_OPTIMIZER[name], auto={"preset": "hf", **known})
    assert config.optimizer.type == "AdamW" and config.optimizer.exclude_norms_and_biases
    params = {name: config.optimizer.params[name] for name in ("lr", "betas", "eps")}
    assert params == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    assert config.optimizer.params["weight_decay"] == 0
    has_schedule = name == "a scheduler alone"
    assert config.scheduler.type == ("WarmupDecayLR" if has_schedule else "linear")
    assert config.scheduler.params["total_num_steps"] == 10
    assert "optimizer.type: Not set: AdamW, as Hugging Face's Trainer has it." in config.notes
    assert any(note.startswith("scheduler.type: Not set") for note in config.notes) != has_schedule
    assert Config.load(config.given).model_dump() == config.model_dump()


@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_its_rate_and_its_steps_are_asked_for(name):
    with pytest.raises(ConfigError) as caught:
        Config.load(WITHOUT_OPTIMIZER[name], auto="hf")
    advice = str(caught.value).splitlines()[-1]
    options = advice.partition("Add ")[2].partition(" to the command")[0].split("--auto ")[1:]
    asked = {option.partition("=")[0] for option in options}
    assert asked == {*ASKED, *(["train_micro_batch_size_per_gpu"] if name == "auto" else [])}
    assert Config.load(WITHOUT_OPTIMIZER[name], auto=["hf", *(o.strip() for o in options)])
    line = next(x for x in str(caught.value).splitlines() if "optimizer.params.lr: found" in x)
    assert ("warmup_max_lr" in line) == (name == "a scheduler alone")
    rows = explain_config({"optimizer": None, **WITHOUT_OPTIMIZER[name]}, auto="hf")
    assert not [row for row in rows if "is taken" in row.sentence]
    with_steps = WITHOUT_OPTIMIZER[name] | {"run": {"steps": 7}} | BATCH
    with_steps.pop("train_batch_size", None)
    config = Config.load(with_steps, auto=["hf", "optimizer.params.lr=1e-3"])
    assert config.scheduler.params["total_num_steps"] == 7


def test_nothing_is_added_to_what_the_config_or_the_caller_has():
    config = Config.load(TRAINED, auto="hf")
    assert config.optimizer.type == "SGD" and config.scheduler.type == "WarmupLR"
    lion = Config.load(BATCH, auto=["hf", "optimizer.type=Lion", "scheduler.type=WarmupLR"])
    assert (lion.optimizer.type, lion.scheduler.type) == ("Lion", "WarmupLR")
    assert "Trainer" not in str(lion.notes)
    assert Config.load(BATCH, auto={"train_batch_size": 8}).optimizer is None
    passed = Config.load(BATCH, auto="hf", has_optimizer=True)
    assert passed.optimizer is None and passed.scheduler is None


def test_no_rate_is_asked_for_that_the_schedule_would_overrule():
    cycle = {"type": "onecycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    config = Config.load(BATCH | {"scheduler": cycle}, auto="hf")
    assert config.optimizer.type == "AdamW" and config.scheduler.type == "OneCycle"


def test_what_is_filled_in_are_the_defaults_of_transformers(references):
    theirs = references.call("trainer.defaults")
    tree = BATCH | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    config = Config.load(tree, auto={"preset": "hf", **ASKED})
    params = config.optimizer.params
    ours = {
        "weight_decay": params["weight_decay"],
        "adam_beta1": params["betas"][0],
        "adam_beta2": params["betas"][1],
        "adam_epsilon": params["eps"],
        "lr_scheduler_type": config.scheduler.type,
        "warmup_steps": config.scheduler.params["warmup_num_steps"],
        "max_grad_norm": config.gradient_clipping,
        "bf16": config.bf16.enabled,
        "fp16": config.fp16.enabled,
    }
    assert theirs.pop("optim").startswith("adamw_torch") and config.optimizer.type == "AdamW"
    assert theirs == {name: str(value) for name, value in ours.items()}


def test_an_optimizer_without_a_schedule_decays_as_in_the_trainer():
    tree = BATCH | {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}
    config = Config.load(tree, auto=["hf", "scheduler.params.total_num_steps=10"])
    assert config.optimizer.type == "Lion" and config.scheduler.type == "linear"


def test_what_initialize_still_needs_is_said_without_auto():
    def needs(tree, **options):
        return [line.partition(":")[0] for line in still_needed(examine(tree, **options))]

    batch = "train_batch_size or train_micro_batch_size_per_gpu"
    assert needs({}) == ["optimizer", batch]
    assert needs(BATCH) == needs({"train_batch_size": 8}) == ["optimizer"]
    assert needs({"optimizer": {"type": "Adm"}, "train_batch_size": "8"}) == []
    assert needs({"train_batch_size": "auto"}) == ["optimizer"]
    elastic = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2]}
    assert needs({"elasticity": elastic} | TRAINED) == []
    assert needs(BATCH, auto="hf") == []
    epochs = BATCH | {"run": {"epochs": 1}}
    assert needs(epochs, auto=["hf", "optimizer.params.lr=1e-3"]) == ["run.steps"]


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
    assert Config.load(config.given).model_dump() == config.model_dump()
    assert config.model_copy(update={"steps_per_print": 5}).optimizer == config.optimizer


def test_a_problem_is_data():
    examined = examine(HUGGING_FACE | {"zero_optimization": {"stge": 3}}, auto={"preset": "hf"})
    paths = {problem.path for problem in examined.problems}
    assert "zero_optimization.stge" in paths
    assert examined.settings.zero_optimization.stage == 0
    assert examined.filled["gradient_clipping"].value == 1.0
    assert not examine(HUGGING_FACE, auto={"preset": "hf", **KNOWN}).problems
