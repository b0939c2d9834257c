"""Resolved values of mesh, "auto", optimizer and schedule keys."""

import pytest

from jaxspeed.axes import AXES
from jaxspeed.config import Config, load_config
from jaxspeed.config.equivalent_keys import without_axes
from jaxspeed.config.lr_schedules import SCHEDULERS
from jaxspeed.config.optimizers import OPTIMIZERS

pytestmark = pytest.mark.fast


def mesh(**tree):
    built = load_config(tree).mesh
    return {axis: getattr(built, axis) for axis in AXES if getattr(built, axis) != 1}


@pytest.mark.parametrize(
    ("tree", "axes"),
    [
        ({}, {"data": -1}),
        ({"mesh": {"tensor": 2}}, {"data": -1, "tensor": 2}),
        ({"mesh": {"tensor": -1}}, {"tensor": -1}),
        ({"tensor_parallel": {"autotp_size": 4}}, {"data": -1, "tensor": 4}),
        ({"tensor_parallel": {"autotp_size": 0}}, {"data": -1}),
        (
            {"tensor_parallel": {"autotp_size": 4}, "mesh": {"tensor": -1}},
            {"data": -1, "tensor": 4},
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 4}},
            {"data": -1, "expert": 4},
        ),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}}, {"data": -1}),
        (
            {
                "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
                "data_parallel_size": 8,
                "use_data_before_expert_parallelism": True,
            },
            {"data": 4, "expert": 2},
        ),
        ({"sequence_parallel_size": 4}, {"data": -1, "seq": 4}),
        ({"sequence_parallel_size": 4, "data_parallel_size": 2}, {"data": 2, "seq": 4}),
        ({"sequence_parallel_size": 4, "mesh": {"seq": -1, "data": 2}}, {"data": 2, "seq": 4}),
        ({"data_parallel_size": 8}, {"data": 8}),
        ({"data_parallel_size": 8, "mesh": {"replica": 2}}, {"replica": 2, "data": 4}),
        ({"data_parallel_size": 8, "mesh": {"replica": -1, "data": 2}}, {"replica": 4, "data": 2}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {"replica": -1, "data": 4}),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "data_parallel_size": 8},
            {"replica": 2, "data": 4},
        ),
        (
            {"zero_optimization": {"stage": 1, "mics_shard_size": 4}, "mesh": {"replica": 2}},
            {"replica": 2, "data": 4},
        ),
    ],
)
def test_all_words_for_the_mesh_come_to_one_mesh(tree, axes):
    assert mesh(**tree) == axes


@pytest.mark.parametrize(
    "given",
    [
        {"mesh": {"tensor": 2, "expert": 2, "seq": 2}, "data_parallel_size": 2},
        {
            "sequence_parallel_size": 4,
            "seq_parallel_communication_data_type": "fp16",
            "parallel": {"sequence": {"kind": "ulysses"}, "remat": "full"},
        },
        {"expert_parallel": {"enabled": True, "autoep_size": 2}, "pipeline": {"stages": 2}},
        {"zero_optimization": {"stage": 2, "mics_shard_size": 4}},
        {"tensor_parallel": {"autotp_size": 2}},
    ],
)
def test_without_the_keys_of_axes_a_config_is_for_one_device(given):
    kept = without_axes({"train_micro_batch_size_per_gpu": 1, **given})
    config = Config.load(kept)
    sizes = config.mesh.model_dump()
    assert {axis for axis, size in sizes.items() if size not in (1, -1)} == set()
    assert "sequence" not in config.parallel.model_fields_set
    assert config.parallel.remat == given.get("parallel", {}).get("remat", "none")


def test_with_sequences_their_key_sets_the_dtype_in_which_gradients_are_reduced():
    of_all, of_sequences = "communication_data_type", "seq_parallel_communication_data_type"
    both = {of_all: "fp16", of_sequences: "bf16"}
    assert Config.load(both).reduction_dtype == "fp16"
    assert Config.load(both | {"mesh": {"seq": 2}}).reduction_dtype == "bf16"
    assert Config.load({of_all: "fp16", "mesh": {"seq": 2}}).reduction_dtype == "fp16"
    assert Config.load({"mesh": {"seq": 2}}).reduction_dtype is None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("spell", [str, str.lower, str.upper])
def test_an_optimizer_has_its_canonical_name_however_it_is_spelt(name, spell):
    config = load_config({"optimizer": {"type": spell(name), "params": {"lr": 0.1}}})
    assert config.optimizer.type == name


# DeepSpeed 0.19: FusedAdam, FusedLamb, FusedLion, MuonWithAuxAdam; torch: SGD, Adagrad.
DEFAULTS = {
    "Adam": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "adam_w_mode": True,
    },
    "AdamW": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "adam_w_mode": True,
    },
    "SGD": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "Adagrad": {
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
    },
    "Lamb": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "eps_inside_sqrt": False,
        "weight_decay": 0.0,
        "bias_correction": True,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
    },
    "Lion": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "Muon": {
        "muon_lr": 0.1,
        "adam_lr": 0.1,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "ns_method": "gram",
        "per_head_muon": False,
        "consistent_rms": None,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
    },
    "NorMuon": {  # microsoft/dion's
        "muon_lr": 0.1,
        "adam_lr": 0.1,
        "mu": 0.95,
        "muon_beta2": 0.95,
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "epsilon": 1e-8,
        "nesterov": False,
        "adjust_lr": "spectral_norm",
        "use_gram_newton_schulz": False,
    },
    "SOAP": {  # nikhilvyas/SOAP's
        "betas": (0.95, 0.95),
        "shampoo_beta": -1.0,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "precondition_frequency": 10,
        "max_precond_dim": 10000,
    },
}


_EIGHT_BIT = {
    "AdamW8bit": {**DEFAULTS["AdamW"], "weight_decay": 0.01},
    "Adam8bit": DEFAULTS["Adam"],
    "Lion8bit": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}
for _name, _defaults in _EIGHT_BIT.items():  # bitsandbytes'
    DEFAULTS[_name] = DEFAULTS[f"Paged{_name}"] = {**_defaults, "min_8bit_size": 4096}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_filled_with_deepspeeds_defaults(name):
    config = load_config({"optimizer": {"type": name, "params": {"lr": 0.1}}})
    assert config.optimizer.params == {"lr": 0.1} | DEFAULTS[name]


SCHEDULE_DEFAULTS = {
    "WarmupLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupDecayLR": {
        "total_num_steps": 9,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": 9,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.2,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "linear": {"total_num_steps": 9, "warmup_num_steps": 0},
}
REQUIRED = {
    "WarmupDecayLR": {"total_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "linear": {"total_num_steps": 9},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_are_filled_with_their_defaults(name):
    tree = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": name.lower(), "params": REQUIRED.get(name, {})},
    }
    scheduler = load_config(tree).scheduler
    assert (scheduler.type, scheduler.params) == (name, SCHEDULE_DEFAULTS[name])


def test_torch_only_parameters_are_accepted_and_left_out():
    params = {"lr": 0.1, "fused": True, "foreach": False, "amsgrad": False}
    config = load_config({"optimizer": {"type": "AdamW", "params": params}})
    assert config.optimizer.params == {"lr": 0.1} | DEFAULTS["AdamW"]


@pytest.mark.parametrize(
    ("params", "decay"),
    [
        ({"torch_adam": True}, 0.01),
        ({"torch_adam": True, "weight_decay": 0.1}, 0.1),
        ({"torch_adam": False}, 0.0),
        ({}, 0.0),
    ],
)
def test_torchs_adamw_decays_by_default_and_deepspeeds_does_not(params, decay):
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, **params}}}
    filled = load_config(tree).optimizer.params
    assert filled["weight_decay"] == decay
    assert "torch_adam" not in filled
    coupled = {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False, **params}}
    assert load_config({"optimizer": coupled}).optimizer.params["weight_decay"] == params.get(
        "weight_decay", 0.0
    )


def test_muons_own_rates_override_lr():
    params = {"lr": 0.1, "muon_lr": 0.5}
    filled = load_config({"optimizer": {"type": "Muon", "params": params}}).optimizer.params
    assert (filled["muon_lr"], filled["adam_lr"]) == (0.5, 0.1)


def test_muon_without_a_rate_has_deepspeeds_two_under_a_schedule_that_sets_it():
    tree = {"optimizer": {"type": "Muon"}, "scheduler": {"type": "LRRangeTest"}}
    filled = load_config(tree).optimizer.params
    assert (filled["muon_lr"], filled["adam_lr"]) == (0.02, 3e-4)


@pytest.mark.parametrize("name", ["WarmupDecayLR", "OneCycle", "LRRangeTest"])
def test_a_schedule_that_sets_the_rate_makes_lr_optional(name):
    tree = {
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": name, "params": REQUIRED.get(name, {})},
    }
    assert load_config(tree).optimizer.params["lr"] == 1e-3


HF = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "total_num_steps": "auto", "warmup_num_steps": 10},
    },
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "model": {"family": "gpt2", "config": {"hidden_size": 768}},
    "run": {"steps": 500},
    "mesh": {"tensor": 2},
    "tensor_parallel": {"autotp_size": "auto"},
}


def test_auto_takes_what_the_config_knows():
    config = load_config(HF)
    assert config.scheduler.params["warmup_max_lr"] == 3e-4
    assert config.scheduler.params["total_num_steps"] == 500
    assert config.fp16.enabled is False
    assert config.zero_optimization.stage3_param_persistence_threshold == 7680
    assert config.tensor_parallel.autotp_size == 2
    assert config.batch(8).train == 32
    assert config.gradient_accumulation_steps is None


def test_auto_is_a_word_of_its_own_where_the_schema_says_so():
    config = load_config(
        {
            "parallel": dict.fromkeys(
                ("gradient_reduction", "tensor_overlap", "infer_tensor_cuts"), "auto"
            ),
            "pipeline": {"stages": "auto"},
        }
    )
    assert config.parallel.gradient_reduction == "auto"
    assert config.parallel.tensor_overlap == "auto"
    assert config.parallel.infer_tensor_cuts == "auto"


@pytest.mark.parametrize(
    ("tree", "dtype"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "bf16"),
        ({"torch_autocast": {"enabled": False, "dtype": "float16"}}, "fp32"),
    ],
)
def test_the_compute_format_follows_the_precision_sections(tree, dtype):
    assert load_config(tree).compute_dtype == dtype


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_formats_have_many_names_and_one_meaning(name):
    assert Config(communication_data_type=name).communication_data_type == "bf16"


def test_what_was_set_is_told_from_what_is_a_default():
    assert Config().gradient_clipping == 1.0
    assert "gradient_clipping" not in Config().model_fields_set
    assert "gradient_clipping" in Config(gradient_clipping=1.0).model_fields_set
