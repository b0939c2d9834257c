"""Configs as DeepSpeed's users write them load as they are, from JSON too, and fit the schema."""

import json

import pytest

from jaxspeed.config import Config, explain_config, load_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

SAMPLES = {
    "getting started": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    },
    "zero 3 in bf16": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "steps_per_print": 10,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
        "zero_allow_untested_optimizer": True,
        "activation_checkpointing": {
            "partition_activations": False,
            "contiguous_memory_optimization": True,
            "cpu_checkpointing": False,
        },
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
        "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "run"},
        "comms_logger": {"enabled": False, "prof_ops": ["all_reduce"]},
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
    },
    "GPT-2 with fp16 and a fixed scale": {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 8,
        "fp16": {"enabled": True, "loss_scale": 1024.0},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "decay_lr_rate": 1e-3},
        },
        "pipeline": {"seed_layers": False, "partition": "best"},
        "elasticity": {"enabled": False, "min_gpus": 1},
    },
    "elastic": {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 2000,
            "micro_batch_sizes": [2, 4, 6],
            "min_gpus": 1,
            "max_gpus": 10000,
            "min_time": 20,
            "version": 0.1,
        },
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    },
    "AutoTP with custom patterns": {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "tensor_parallel": {
            "autotp_size": 4,
            "preset_model": "llama",
            "tp_overlap_comm": True,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {
                        "patterns": [".*\\.o_proj\\.weight$", ".*\\.down_proj\\.weight$"],
                        "partition_type": "row",
                    },
                    {"patterns": [".*\\.[qkv]_proj\\.weight$"], "partition_type": "column"},
                    {
                        "patterns": [".*\\.(up|gate)_proj$"],
                        "shape": [-1, -1],
                        "partition_dim": 0,
                        "gather_output": True,
                    },
                    {"patterns": [".*\\.router$"], "partition_type": "skip"},
                ],
            },
        },
    },
    "tensor parallel in jaxspeed's keys": {
        "mesh": {"tensor": 2},
        "tensor_parallel": {
            "preset_model": "GPT-2",
            "partition_config": {
                "layer_specs": {
                    "**/enc/proj": "column",
                    "dec/out": {"type": "row", "dim": 0},
                    "tokens": "vocabulary",
                    "router": "replicated",
                }
            },
        },
        "parallel": {
            "sequence_parallel_activations": True,
            "tensor_overlap": "ring_both_ways",
            "infer_tensor_cuts": "never",
            "logical_axes": {"head/kernel": ["embed", None]},
        },
    },
    "gradients around a ring": {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 2},
        "mesh": {"replica": 2},
        "parallel": {
            "data_reduction": "ring",
            "ring_directions": "one",
            "ring_wire": "int8",
            "ring_bucket_bytes": "4 MiB",
        },
    },
    "a parameter server": {
        "train_batch_size": 32,
        "parallel": {
            "data_reduction": "parameter_server",
            "servers": 2,
            "max_staleness": 4,
            "on_stale": "drop",
            "staleness_decay": 0.9,
            "worker_pace": [1.0, 1.0, 5.0],
        },
    },
    "pipeline parallel": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 16,
        "zero_optimization": {"stage": 1},
        "pipeline": {
            "stages": 4,
            "partition": "type:Block",
            "seed_layers": True,
            "activation_checkpoint_interval": 1,
            "pipe_partitioned": True,
            "grad_partitioned": False,
        },
    },
    "pipeline parallel in jaxspeed's keys": {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 3},
        "mesh": {"pipe": 4, "tensor": 2},
        "parallel": {
            "pipeline_schedule": "interleaved",
            "pipeline_chunks": 3,
            "pipeline_recompute": "save",
            "pipeline_gather": "step",
        },
    },
    "with the own sections": {
        "train_batch_size": 32,
        "optimizer": {
            "type": "muon",
            "params": {"lr": 0.02, "adam_lr": 3e-4},
            "groups": [
                {"pattern": "embed", "lr_factor": 0.1},
                {"pattern": "blocks/*/norm", "weight_decay": 0.0},
                {"pattern": "**/lora_*", "frozen": True},
            ],
            "exclude_norms_and_biases": True,
            "ema_decay": 0.999,
        },
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3},
        "mesh": {"data": -1, "tensor": 2},
        "parallel": {"units": ["blocks/*"], "full_precision": ["router"]},
        "model": {"family": "llama", "preset": "llama3-8b", "config": {"num_hidden_layers": 2}},
        "run": {"steps": 1000, "seed": 7, "compilation_cache": "/tmp/cache"},
        "_comment": "mine",
    },
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_plain_config_loads_from_a_dict_and_from_json(name, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(SAMPLES[name]))
    assert load_config(path) == load_config(SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_config_loads_from_its_own_dump(name):
    config = load_config(SAMPLES[name])
    assert load_config(config.model_dump(mode="json")).model_dump() == config.model_dump()


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_in_a_plain_config_is_refused(name):
    assert {row.verdict for row in explain_config(SAMPLES[name])} <= {
        "honoured",
        "harmless",
        "approximated",
    }


# A JSON Schema validator of the keywords that are in use; any other fails the test.
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": (int, float),
    "number": (int, float),
}
ANNOTATIONS = {"title", "description", "default", "$schema"}


def valid(schema, value):
    return all(CHECKS[word](schema, value) for word in schema if word not in ANNOTATIONS)


def is_type(schema, value):
    if schema["type"] in ("integer", "number") and isinstance(value, bool):
        return False
    if schema["type"] == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[schema["type"]])


def properties(schema, value):
    known = schema.get("properties", {})
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in known:
            if not valid(known[key], item):
                return False
        elif not key.startswith("_") and schema.get("additionalProperties") is False:
            return False
    return True


def number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


CHECKS = {
    "type": is_type,
    "properties": properties,
    "additionalProperties": lambda schema, value: (
        not isinstance(schema["additionalProperties"], dict)
        or not isinstance(value, dict)
        or all(valid(schema["additionalProperties"], item) for item in value.values())
    ),
    "patternProperties": lambda schema, value: schema["patternProperties"] == {"^_": {}},
    "required": lambda schema, value: (
        not isinstance(value, dict) or {*schema["required"]} <= {*value}
    ),
    "anyOf": lambda schema, value: any(valid(option, value) for option in schema["anyOf"]),
    "enum": lambda schema, value: value in schema["enum"],
    "const": lambda schema, value: value == schema["const"],
    "items": lambda schema, value: (
        not isinstance(value, list) or all(valid(schema["items"], item) for item in value)
    ),
    "prefixItems": lambda schema, value: (
        not isinstance(value, list) or all(map(valid, schema["prefixItems"], value))
    ),
    "minItems": lambda schema, value: (
        not isinstance(value, list) or len(value) >= schema["minItems"]
    ),
    "maxItems": lambda schema, value: (
        not isinstance(value, list) or len(value) <= schema["maxItems"]
    ),
    "minLength": lambda schema, value: (
        not isinstance(value, str) or len(value) >= schema["minLength"]
    ),
    "minimum": lambda schema, value: not number(value) or value >= schema["minimum"],
    "maximum": lambda schema, value: not number(value) or value <= schema["maximum"],
    "exclusiveMinimum": lambda schema, value: (
        not number(value) or value > schema["exclusiveMinimum"]
    ),
    "exclusiveMaximum": lambda schema, value: (
        not number(value) or value < schema["exclusiveMaximum"]
    ),
}


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("name", SAMPLES)
def test_the_json_schema_accepts_what_loads(name):
    assert valid(Config.json_schema(), json.loads(json.dumps(SAMPLES[name])))


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize(
    "tree",
    [
        {"train_batch_sise": 8},
        {"train_batch_size": "8"},
        {"train_batch_size": 8.5},
        {"dump_state": 1},
        {"zero_optimization": {"stage": 4}},
        {"optimizer": {"type": "Adma"}},
        {"optimizer": {"params": {}}},
        {"optimizer": {"type": "Adam", "params": {"beta": 1}}},
        {"parallel": {"units": "blocks"}},
        {"gradient_clipping": "none"},
        {"parallel": {"pipeline_chunks": 1}},
        {"parallel": {"pipeline_recompute": "none"}},
        {"parallel": {"data_reduction": "rings"}},
        {"parallel": {"staleness_decay": 0}},
        {"parallel": {"max_staleness": -1}},
        {"parallel": {"worker_pace": [0]}},
        {"pipeline": {"stages": "all"}},
        {"tensor_parallel": {"partition_config": {"layer_specs": "column"}}},
        {"tensor_parallel": {"partition_config": {"layer_specs": {"up": "colunm"}}}},
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": ["up"]}]}}},
    ],
)
def test_the_json_schema_refuses_what_does_not_load(tree):
    assert not valid(Config.json_schema(), tree)
    with pytest.raises(ConfigError):
        load_config(tree)


def test_the_json_schema_describes_each_key_with_its_verdict():
    stage = Config.json_schema()["properties"]["zero_optimization"]["properties"]["stage"]
    assert stage["title"] == "zero_optimization.stage"
    assert stage["description"].startswith("honoured: State sharded over data")
    refused = Config.json_schema()["properties"]["sparse_gradients"]
    assert refused["description"].startswith("refused: ")


def test_the_json_schema_is_json_and_has_no_references():
    text = json.dumps(Config.json_schema())
    assert "$ref" not in text
    assert "$defs" not in text
