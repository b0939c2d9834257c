"""`explain_config`: one row a key, good or bad."""

import pytest

from jaxspeed.config import Config, explain_config
from jaxspeed.config.auto import with_value
from jaxspeed.config.tree import VOCABULARY, given_leaves, read

pytestmark = pytest.mark.fast


def rows_of(config, **keywords):
    rows = explain_config(config, **keywords)
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row for row in rows}


def test_each_key_that_was_given_has_a_row_with_its_value_and_verdict():
    config = {
        "train_batch_size": 8,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
        "_note": "mine",
    }
    rows = rows_of(config)
    assert {(key, row.value, row.verdict) for key, row in rows.items()} == {
        ("train_batch_size", 8, "honoured"),
        ("torch_autocast.enabled", True, "honoured"),
        ("torch_autocast.dtype", "bfloat16", "honoured"),
        ("zero_optimization.stage", 3, "honoured"),
        ("zero_optimization.reduce_bucket_size", 5e8, "harmless"),
        ("_note", "mine", "harmless"),
        ("gradient_clipping", 1.0, "honoured"),
    }


def test_the_clipping_that_acts_is_explained_though_nobody_set_it():
    assert rows_of({})["gradient_clipping"].sentence.startswith("Not set. DeepSpeed's default")
    assert "Not set" not in rows_of({"gradient_clipping": 0.0})["gradient_clipping"].sentence


def test_a_key_whose_switch_is_off_says_nothing():
    rows = rows_of({"fp16": {"enabled": False, "loss_scale": 128}})
    assert rows["fp16.loss_scale"].verdict == "harmless"
    assert "fp16.enabled is false" in rows["fp16.loss_scale"].sentence
    assert rows_of({"fp16": {"enabled": True, "loss_scale": 128}})["fp16.loss_scale"].verdict == (
        "honoured"
    )


TENSOR = {
    "parallel": {
        "sequence_parallel_activations": True,
        "tensor_overlap": "ring",
        "infer_tensor_cuts": "never",
    },
    "tensor_parallel": {
        "preset_model": "llama",
        "partition_config": {"layer_specs": {"up": "column"}, "use_default_specs": True},
        "tp_overlap_comm": True,
    },
}


def test_keys_of_the_tensor_axis_are_ignored_while_it_is_one_device():
    leaves = [path for path, _ in given_leaves(TENSOR)]
    alone = rows_of(TENSOR)
    assert {alone[path].verdict for path in leaves} == {"harmless"}
    assert {alone[path].sentence for path in leaves} == {"Ignored while mesh.tensor is 1."}
    for size in ({"mesh": {"tensor": 2}}, {"mesh": {"tensor": -1}}):
        sharded = rows_of(TENSOR | size)
        assert {path for path in leaves if sharded[path].verdict != "honoured"} == {
            "tensor_parallel.tp_overlap_comm"
        }
    by_other_word = TENSOR | {
        "tensor_parallel": TENSOR["tensor_parallel"] | {"autotp_size": 4},
    }
    assert rows_of(by_other_word)["parallel.tensor_overlap"].verdict == "honoured"


def test_a_preset_that_custom_specs_replace_says_nothing():
    partition = {"layer_specs": {"up": "column"}, "use_default_specs": False}
    section = {"autotp_size": 2, "preset_model": "llama", "partition_config": partition}
    row = rows_of({"tensor_parallel": section})["tensor_parallel.preset_model"]
    assert row.verdict == "harmless"
    assert "use_default_specs is false" in row.sentence


def test_keys_of_another_reduction_are_ignored():
    ring = rows_of({"parallel": {"data_reduction": "ring", "ring_wire": "bf16", "servers": 1}})
    assert ring["parallel.ring_wire"].verdict == "honoured"
    assert ring["parallel.servers"].sentence == ('Ignored while parallel.data_reduction is "ring".')
    in_step = {"data_reduction": "parameter_server", "on_stale": "wait"}
    row = rows_of({"parallel": in_step})["parallel.on_stale"]
    assert row.sentence == "Ignored while parallel.max_staleness is null."
    apart = rows_of({"parallel": in_step | {"max_staleness": 0}})["parallel.on_stale"]
    assert apart.verdict == "honoured"


def test_an_auto_says_what_it_became():
    config = {
        "run": {"steps": 70},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    assert rows_of(config)["scheduler.params.total_num_steps"].sentence.endswith(
        "Here: 70, from run.steps."
    )


def test_a_batch_size_that_follows_from_others_is_computed():
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
    }
    rows = rows_of(config)
    here = "Here: computed, from train_micro_batch_size_per_gpu."
    assert rows["train_batch_size"].sentence.endswith(here)
    here = "Here: computed, from train_batch_size or train_micro_batch_size_per_gpu."
    assert rows["gradient_accumulation_steps"].sentence.endswith(here)
    sizes = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2]}
    elastic = rows_of({"train_batch_size": "auto", "elasticity": sizes})
    assert elastic["train_batch_size"].sentence.endswith("Here: computed, from elasticity.")


def test_a_rate_that_the_schedule_overrules_is_harmless():
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}},
    }
    rows = rows_of(config)
    assert rows["optimizer.params.lr"].verdict == "harmless"
    assert rows["scheduler.params.warmup_max_lr"].value == 0.001
    assert rows["scheduler.params.warmup_type"].value == "log"


def test_a_bad_config_is_explained_and_not_raised_about():
    config = {
        "train_batch_size": "8",
        "zero_optimization": {"stge": 2, "offload_optimizer": {"device": "nvme"}},
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 2]}},
        "amp": {"enabled": True, "opt_level": "O1"},
        "bfloat16": {"enabled": "maybe"},
        "gradient_clipping": "auto",
        "mesh": {"tensor": 2},
    }
    rows = rows_of(config)
    refused = {key for key, row in rows.items() if row.verdict == "refused"}
    assert refused == {
        "train_batch_size",
        "zero_optimization.stge",
        "zero_optimization.offload_optimizer.nvme_path",
        "optimizer.params.betas",
        "amp",
        "bfloat16.enabled",
        "gradient_clipping",
    }
    assert 'Did you mean "stage"?' in rows["zero_optimization.stge"].sentence
    assert rows["mesh.tensor"].verdict == "honoured"


def test_a_refused_section_is_one_row():
    shared = {"enabled": True, "quantize_groups": 1, "schedule_offset": 0}
    weights = {"shared_parameters": shared, "different_groups": {"a": {"modules": ["x"]}}}
    section = {"weight_quantization": weights, "activation_quantization": {"enabled": False}}
    config = {"train_batch_size": 8, "compression_training": section}
    rows = rows_of(config)
    assert rows.keys() == {"train_batch_size", "compression_training", "gradient_clipping"}
    row = rows["compression_training"]
    assert (row.value, row.verdict) == (section, "refused")
    assert row.sentence.startswith("Found {") and "Removed in DeepSpeed 0.19.8" in row.sentence


@pytest.mark.parametrize(("written", "stage"), [(True, 1), (False, 0)])
def test_zero_as_a_flag_is_its_stage(written, stage):
    row = rows_of({"zero_optimization": written})["zero_optimization"]
    assert (row.value, row.verdict) == (written, "honoured")
    assert row.sentence.startswith(f"{str(written).lower()} is stage {stage}. State sharded")
    assert rows_of({"zero_optimization": {}})["zero_optimization"].sentence.startswith("Empty")
    assert rows_of({"optimizer": None})["optimizer"].sentence == "Not set."


OFF = {
    "wall_clock_breakdown": False,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "communication_data_type": None,
    "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.number_checkpoints": None,
    "checkpoint.use_node_local_storage": False,
    "optimizer.params.torch_adam": False,
    "pipeline.activation_checkpoint_interval": 0,
    "tensor_parallel.tp_overlap_comm": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
}
WITH_ALL_AXES = {"mesh": {"tensor": 2, "pipe": 2}, "optimizer": {"type": "Adam", "params": {}}}


@pytest.mark.parametrize("path", OFF)
def test_a_key_that_is_off_does_nothing(path):
    row = rows_of(with_value(WITH_ALL_AXES, path, OFF[path]))[path]
    assert row.verdict == "harmless"
    assert row.sentence.startswith("A no-op at this value; others are approximated: ")


def test_a_flag_that_is_approximated_at_false_says_why():
    """Each of the others has a reason to be no no-op at its default."""
    flags = {path for path, key in VOCABULARY.items()
             if key.verdict == "approximated" and not key.is_off(False)
             and OFF.keys().isdisjoint([path])}  # fmt: skip
    defaults = {path: read(Config.load({}), path) for path in flags}
    assert {path for path, value in defaults.items() if value is False} == {"fp16.auto_cast"}
    row = rows_of({"fp16": {"enabled": True, "auto_cast": False}})["fp16.auto_cast"]
    assert row.verdict == "approximated" and "in any case" in row.sentence


def test_options_of_parameters_on_a_disk_are_explained_where_they_would_be():
    keys = {"nvme_path": "/nvme", "buffer_count": 4, "buffer_size": 1, "max_in_cpu": 1}
    for device, sentence in {
        "nvme": "parameters are not stored there",
        "cpu": 'Ignored while zero_optimization.offload_param.device is "cpu".',
    }.items():
        section = {"device": device, "pin_memory": True, **keys}
        rows = rows_of({"zero_optimization": {"stage": 3, "offload_param": section}})
        for key in keys:
            row = rows[f"zero_optimization.offload_param.{key}"]
            assert row.verdict == "harmless" and sentence in row.sentence
        pinned = rows["zero_optimization.offload_param.pin_memory"]
        assert pinned.verdict == "approximated" and "Always on" in pinned.sentence


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"max_grad_norm": 1.0}, 'Did you mean "gradient_clipping"? DeepSpeed ignores it.'),
        ({"bf16": {"loss_scale": 0}}, "remove the key. DeepSpeed refuses it too."),
        ({"fp16": {"opt_level": "O1"}}, "remove the key. DeepSpeed refuses it too."),
        ({"fp16": {"frobnicate": 1}}, "min_loss_scale, auto_cast, fp16_master_weights_and_grads. "
                                      "DeepSpeed refuses it too."),
        ({"optimizer": {"type": "SGD", "params": {"beta": 1}}}, "DeepSpeed refuses it too."),
        ({"expert_parallel": {"enable": True}}, "DeepSpeed ignores it."),
    ],
)  # fmt: skip
def test_a_key_that_is_refused_here_says_what_deepspeed_does(tree, sentence):
    (row,) = [row for row in rows_of(tree).values() if row.verdict == "refused"]
    assert row.sentence.endswith(sentence)
    (own,) = [r for r in rows_of({"mesh": {"tensr": 2}}).values() if r.verdict == "refused"]
    assert "DeepSpeed" not in own.sentence


def test_a_file_that_is_not_there_is_a_refused_row():
    rows = explain_config("/nowhere/ds_config.json")
    assert rows[0].verdict == "refused"
    assert "no such file" in rows[0].sentence


def test_a_config_is_explained_as_its_source_was():
    config = Config.load({"train_batch_size": 8}, ["bf16.enabled=true"])
    assert explain_config(config) == explain_config(
        {"train_batch_size": 8, "bf16": {"enabled": True}}
    )


def test_parameters_of_a_refused_optimizer_are_refused():
    params = {"lr": 1e-3, "freeze_step": 100, "fused": True}
    rows = rows_of({"optimizer": {"type": "OneBitAdam", "params": params}})
    assert {rows[f"optimizer.params.{name}"].verdict for name in params} == {"refused"}


def test_offload_of_parameters_below_stage_3_is_approximated():
    def verdict(stage, device="cpu"):
        zero = {"stage": stage, "offload_param": {"device": device}}
        return rows_of({"zero_optimization": zero})["zero_optimization.offload_param.device"]

    assert verdict(3).verdict == "honoured"
    assert verdict(3, "none").verdict == verdict(1, "none").verdict == "honoured"
    assert verdict(2).verdict == "approximated"
    assert "stage 3 only" in verdict(2).sentence
