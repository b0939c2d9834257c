"""DeepSpeed's `autotuning` section: bounds of a search, and keys that have no meaning here."""

import pytest

from jaxspeed.config import Config, explain_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

# As DeepSpeed's tutorial of its autotuner has it.
TUTORIAL = {
    "enabled": True,
    "fast": False,
    "metric": "FLOPS",
    "max_train_batch_size": 1024,
    "min_train_micro_batch_size_per_gpu": 2,
    "max_train_micro_batch_size_per_gpu": 16,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "start_profile_step": 3,
    "end_profile_step": 5,
    "results_dir": "results",
    "exps_dir": "exps",
    "overwrite": False,
    "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
}


def test_deepspeeds_own_section_is_read_and_each_key_told_what_becomes_of_it():
    verdicts = {row.key: row.verdict for row in explain_config({"autotuning": TUTORIAL})}
    assert {"enabled", "fast", "tuner_num_trials"} <= {
        key.removeprefix("autotuning.") for key, found in verdicts.items() if found == "honoured"
    }
    assert verdicts["autotuning.max_train_batch_size"] == "approximated"
    assert verdicts["autotuning.tuner_type"] == "harmless"
    assert "refused" not in verdicts.values()


def test_a_default_of_deepspeeds_is_no_bound():
    tuning = Config(autotuning={"enabled": True, "mp_size": 2}).autotuning
    assert tuning.has("mp_size") and not tuning.has("fast") and not tuning.has("tuner_num_trials")


def test_what_is_not_enabled_bounds_nothing():
    assert not Config(autotuning={"mp_size": 2}).autotuning.has("mp_size")


@pytest.mark.parametrize(
    ("section", "path", "hint"),
    [
        ({"metric": "loss"}, "autotuning.metric", "throughput"),
        ({"mp_size": 0}, "autotuning.mp_size", "1"),
        ({"tuner_tpye": "random"}, "autotuning.tuner_tpye", 'Did you mean "tuner_type"'),
        (
            {"min_train_micro_batch_size_per_gpu": 8, "max_train_micro_batch_size_per_gpu": 4},
            "autotuning.min_train_micro_batch_size_per_gpu",
            "at most 4",
        ),
        ({"max_train_batch_size": 32}, "autotuning.max_train_batch_size", "train_batch_size is 64"),
        ({"min_train_batch_size": 65}, "autotuning.min_train_batch_size", "train_batch_size is 64"),
    ],
)
def test_a_mistake_in_it_is_told_by_its_path(section, path, hint):
    with pytest.raises(ConfigError) as caught:
        Config(train_batch_size=64, autotuning={"enabled": True, **section})
    assert f"  - {path}: " in str(caught.value) and hint in str(caught.value)
