"""Bad configs: each gives one ConfigError, with the key's path and what would work."""

import pytest

from jaxspeed.config import Config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

ADAM = {"type": "Adam", "params": {"lr": 1e-3}}


def adam(**params):
    return {"optimizer": {"type": "Adam", "params": {"lr": 1e-3} | params}}


def schedule(kind, **params):
    return {"optimizer": ADAM, "scheduler": {"type": kind, "params": params}}


def zero(**keys):
    return {"zero_optimization": keys}


def specs(given):
    return {"tensor_parallel": {"partition_config": {"layer_specs": given}}}


BAD = {
    # Unknown keys.
    "misspelt key": (
        {"train_batch_sise": 8},
        "train_batch_sise",
        'Did you mean "train_batch_size"?',
    ),
    "misspelt nested key": (zero(stge=2), "zero_optimization.stge", 'Did you mean "stage"?'),
    "key of another section": (
        {"stage": 2, "strict": True},
        "stage",
        'Did you mean "zero_optimization.stage"?',
    ),
    "unheard-of key": ({"frobnicate": 1, "strict": True}, "frobnicate", 'name with "_"'),
    "unknown optimizer parameter": (
        adam(beta=[0.9, 0.99]),
        "optimizer.params.beta",
        'Did you mean "betas"?',
    ),
    "unknown schedule parameter": (
        schedule("WarmupLR", warmup_steps=10),
        "scheduler.params.warmup_steps",
        'Did you mean "warmup_num_steps"?',
    ),
    "another optimizer's parameter": (
        adam(momentum=0.9),
        "optimizer.params.momentum",
        "Keys of optimizer.params: ",
    ),
    "another trainer's key of packing": (
        {"data": {"sample_packing": True}},
        "data.sample_packing",
        'Did you mean "packing"?',
    ),
    "another trainer's length": (
        {"data": {"max_length": 512}},
        "data.max_length",
        'Did you mean "seq_len"?',
    ),
    "another trainer's key of the loss": (
        {"data": {"assistant_only_loss": True}},
        "data.assistant_only_loss",
        "counts what the assistant says, or the completion; data.train_on",
    ),
    "a number that is no choice": (
        {"model": {"quantize": {"block": 63}}},
        "model.quantize.block",
        "Needs one of 32, 64, 128, 256, 512, 1024, 2048, 4096.",
    ),
    # Wrong types.
    "number as text": ({"train_batch_size": "8"}, "train_batch_size", "Write 8 without quotes."),
    "rate as text": (adam(lr="1e-5"), "optimizer.params.lr", "Write 1e-5 without quotes."),
    "true as text": ({"dump_state": "true"}, "dump_state", "Write true without quotes."),
    "1 for true": ({"dump_state": 1}, "dump_state", "Write true."),
    "true for a number": ({"train_batch_size": True}, "train_batch_size", "an integer"),
    "a fraction of a sample": ({"train_batch_size": 8.5}, "train_batch_size", "Write 8."),
    "null for a number": ({"gradient_clipping": None}, "gradient_clipping", "Remove the key"),
    "flag for a section": ({"fp16": True}, "fp16", 'Write {"enabled": true}'),
    "specs that are text": (
        specs("column"),
        "tensor_parallel.partition_config.layer_specs",
        "a mapping from path patterns",
    ),
    "unknown type of a spec": (
        specs({"up": "colunm"}),
        "tensor_parallel.partition_config.layer_specs.up",
        'Did you mean "column"?',
    ),
    "unknown key of a spec": (
        specs({"up": {"type": "row", "dims": 0}}),
        "tensor_parallel.partition_config.layer_specs.up.dims",
        'Did you mean "dim"?',
    ),
    "spec without a type": (
        specs({"up": {"dim": 0}}),
        "tensor_parallel.partition_config.layer_specs.up.type",
        "Needs a value",
    ),
    "dim of a replicated weight": (
        specs({"up": {"type": "replicated", "dim": 0}}),
        "tensor_parallel.partition_config.layer_specs.up.dim",
        "no sharded dim",
    ),
    "regex for a path pattern": (
        specs({r".*\.[qk]_proj\.weight$": "column"}),
        r"tensor_parallel.partition_config.layer_specs..*\.[qk]_proj\.weight$",
        'a path pattern: "q_proj" and "k_proj"',
    ),
    "torch's path for a path pattern": (
        specs({"mlp.up": "column"}),
        "tensor_parallel.partition_config.layer_specs.mlp.up",
        "'mlp/up'",
    ),
    "DeepSpeed's spec without patterns": (
        specs([{"partition_type": "row"}]),
        "tensor_parallel.partition_config.layer_specs.0.patterns",
        "Needs a value",
    ),
    "DeepSpeed's spec with our type": (
        specs([{"patterns": ["up"], "partition_type": "vocabulary"}]),
        "tensor_parallel.partition_config.layer_specs.0.partition_type",
        'one of "column", "row", "skip"',
    ),
    "DeepSpeed's spec with a misspelt key": (
        specs([{"patterns": ["up"], "partition_typ": "row"}]),
        "tensor_parallel.partition_config.layer_specs.0.partition_typ",
        'Did you mean "partition_type"?',
    ),
    "a regex that no pattern expresses": (
        specs([{"patterns": [r".*\.(?!lm_head)\w*proj$"]}]),
        "tensor_parallel.partition_config.layer_specs.0.patterns.0",
        'Write path patterns instead, such as "',
    ),
    "fused weights": (
        specs([{"patterns": [r".*\.qkv_proj\.weight$"], "shape": [[8, 2, 2], -1]}]),
        "tensor_parallel.partition_config.layer_specs.0.shape",
        "one weight each",
    ),
    "torch's other dim": (
        specs([{"patterns": ["up"], "partition_type": "column", "partition_dim": 1}]),
        "tensor_parallel.partition_config.layer_specs.0.partition_dim",
        "dim of a torch weight",
    ),
    "specs of several models": (
        specs([{"patterns": ["up"], "model_types": ["llama"]}]),
        "tensor_parallel.partition_config.layer_specs.0.model_types",
        "one model",
    ),
    "misspelt key of partition_config": (
        {"tensor_parallel": {"partition_config": {"layer_spec": {}}}},
        "tensor_parallel.partition_config.layer_spec",
        'Did you mean "layer_specs"?',
    ),
    "misspelt preset": (
        {"tensor_parallel": {"preset_model": "lama"}},
        "tensor_parallel.preset_model",
        'Needs one of gpt2, llama, vit, or of gpt3, llama2, llama3, mistral, qwen2. Did you mean '
        '"llama"?',
    ),
    "preset that is not built": (
        {"tensor_parallel": {"preset_model": "mixtral"}},
        "tensor_parallel.preset_model",
        "There is none for mixtral: its experts are sharded by mesh.expert",
    ),
    "old ZeRO flag": ({"zero_optimization": 2}, "zero_optimization", "a mapping of keys"),
    "text for a list": (
        {"parallel": {"units": "blocks/*"}},
        "parallel.units",
        'Write ["blocks/*"].',
    ),
    "a key that is no pattern": (
        {"parallel": {"logical_axes": {"up.kernel": ["embed", None]}}},
        "parallel.logical_axes.up.kernel",
        "'up/kernel'",
    ),
    "not a number": ({"gradient_clipping": float("nan")}, "gradient_clipping", "a finite number"),
    "unknown format": (
        {"communication_data_type": "fp61"},
        "communication_data_type",
        'Did you mean "fp16"?',
    ),
    "unknown reduction": (
        {"gradient_allreduce_op": "average"},
        "gradient_allreduce_op",
        'one of "mean", "sum"',
    ),
    # Out of range.
    "no samples": ({"train_batch_size": 0}, "train_batch_size", "at least 1"),
    "negative clipping": ({"gradient_clipping": -1.0}, "gradient_clipping", "at least 0"),
    "stage 4": (zero(stage=4), "zero_optimization.stage", "at most 3"),
    "stage -1": (zero(stage=-1), "zero_optimization.stage", "at least 0"),
    "negative rate": (adam(lr=-1e-3), "optimizer.params.lr", "at least 0"),
    "beta of one": (adam(betas=[0.9, 1.0]), "optimizer.params.betas.1", "less than 1"),
    "three betas": (adam(betas=[0.9, 0.99, 0.999]), "optimizer.params.betas", "found the list"),
    "no warm-up steps": (
        schedule("WarmupLR", warmup_num_steps=-1),
        "scheduler.params.warmup_num_steps",
        "at least 0",
    ),
    "no stages": (
        {"pipeline": {"stages": 0}},
        "pipeline.stages",
        'at least 1, or "auto" for mesh.pipe',
    ),
    "one chunk": (
        {"parallel": {"pipeline_schedule": "interleaved", "pipeline_chunks": 1}},
        "parallel.pipeline_chunks",
        "at least 2",
    ),
    "unknown pipeline schedule": (
        {"parallel": {"pipeline_schedule": "interleave"}},
        "parallel.pipeline_schedule",
        'Did you mean "interleaved"?',
    ),
    "unknown partition": (
        {"pipeline": {"partition": "profile"}},
        "pipeline.partition",
        'Needs one of best, uniform, parameters, flops, or "type:" and a regex',
    ),
    "a partition by no type": (
        {"pipeline": {"partition": "type:"}},
        "pipeline.partition",
        'or "type:" and a regex',
    ),
    "no devices": ({"mesh": {"data": 0}}, "mesh.data", "at least 1, or -1"),
    "negative devices": ({"mesh": {"tensor": -2}}, "mesh.tensor", "at least 1, or -1"),
    "negative window": ({"fp16": {"loss_scale_window": -1}}, "fp16.loss_scale_window",
                        "at least 0"),
    # Missing.
    "optimizer without type": ({"optimizer": {"params": {}}}, "optimizer.type", "Needs a value"),
    "no end of the decay": (
        schedule("WarmupDecayLR"),
        "scheduler.params.total_num_steps",
        "Needs a value",
    ),
    "a peak from nowhere": (
        {"scheduler": {"type": "WarmupLR"}},
        "scheduler.params.warmup_max_lr",
        "there is no optimizer",
    ),
    # Types by name.
    "misspelt optimizer": (
        {"optimizer": {"type": "AdmaW", "params": {"lr": 1e-3}}},
        "optimizer.type",
        'Did you mean "AdamW"?',
    ),
    "1-bit optimizer": (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
        "optimizer.type",
        'Removed in DeepSpeed 0.19.8, and not built here: write "Adam".',
    ),
    "mu-parametrized optimizer": (
        {"optimizer": {"type": "MuAdam", "params": {"lr": 1e-3}}},
        "optimizer.type",
        'not built. Write "Adam".',
    ),
    "misspelt schedule": (schedule("WarmupRL"), "scheduler.type", 'Did you mean "WarmupLR"?'),
    "unknown warm-up": (
        schedule("WarmupLR", warmup_type="linaer"),
        "scheduler.params.warmup_type",
        'Did you mean "linear"?',
    ),
    # Impossible combinations.
    "fp16 and bf16": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled",
        "bf16.enabled is true",
    ),
    "fp16 and autocast": (
        {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        "torch_autocast.enabled",
        "disable one of the two",
    ),
    "bf16 and autocast to another dtype": (
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        "torch_autocast.enabled",
        "disable one of the two",
    ),
    "autocast to what": ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype", "bfloat16"),
    "loss scale above its start": (
        {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}},
        "fp16.min_loss_scale",
        "above the initial scale 2^4. Needs at most 16",
    ),
    "accumulation alone": (
        {"gradient_accumulation_steps": 4},
        "gradient_accumulation_steps",
        "Needs train_batch_size or train_micro_batch_size_per_gpu",
    ),
    "batch that no device count divides": (
        {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8},
        "train_batch_size",
        "Would work: train_batch_size 96 or 104",
    ),
    "batch against the mesh": (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "mesh": {"data": 4},
        },
        "train_batch_size",
        "64 = train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 "
        "x data-parallel size 4",
    ),
    "tensor said twice": (
        {"mesh": {"tensor": 2}, "tensor_parallel": {"autotp_size": 4}},
        "tensor_parallel.autotp_size",
        "found 4, while mesh.tensor is 2",
    ),
    "data said twice": (
        {"mesh": {"data": 2}, "data_parallel_size": 4},
        "data_parallel_size",
        "found 4, while mesh.data is 2",
    ),
    "replica x data against their product": (
        {"mesh": {"replica": 2, "data": 2}, "data_parallel_size": 8},
        "data_parallel_size",
        "mesh.replica x mesh.data is 2 x 2",
    ),
    "replicas that do not divide": (
        {"mesh": {"replica": 4}, "data_parallel_size": 6},
        "data_parallel_size",
        "found 6, while mesh.replica x mesh.data is 4 x ?",
    ),
    "shard size said twice": (
        {"mesh": {"data": 2}, **zero(stage=3, mics_shard_size=4)},
        "zero_optimization.mics_shard_size",
        "found 4, while mesh.data is 2",
    ),
    "two open axes": ({"mesh": {"data": -1, "tensor": -1}}, "mesh", "At most one axis may be -1"),
    "shards without sharding": (
        zero(stage=0, mics_shard_size=4),
        "zero_optimization.mics_shard_size",
        "1, 2 or 3",
    ),
    "one reduction a step at stage 2": (
        {"parallel": {"gradient_reduction": "step"}, **zero(stage=2)},
        "parallel.gradient_reduction",
        'write "micro_batch" or "auto"',
    ),
    "a key of the ring without a ring": (
        {"parallel": {"ring_wire": "int8"}},
        "parallel.ring_wire",
        'found "int8" with parallel.data_reduction "xla". Only parallel.data_reduction "ring"',
    ),
    "a key of the server in a ring": (
        {"parallel": {"data_reduction": "ring", "servers": 2}},
        "parallel.servers",
        'found 2 with parallel.data_reduction "ring". Only parallel.data_reduction '
        '"parameter_server"',
    ),
    "staleness in step": (
        {"parallel": {"data_reduction": "parameter_server", "staleness_decay": 0.5}},
        "parallel.staleness_decay",
        "set it, or remove the key",
    ),
    "a decay that grows": (
        {"parallel": {"staleness_decay": 1.5}},
        "parallel.staleness_decay",
        "at most 1",
    ),
    "buckets of nothing": (
        {"parallel": {"ring_bucket_bytes": "large"}},
        "parallel.ring_bucket_bytes",
        'text such as "32 MiB"',
    ),
    "a ring through stages": (
        {"parallel": {"data_reduction": "ring"}, "pipeline": {"stages": 2}},
        "mesh.pipe",
        'found 2 with parallel.data_reduction "ring"',
    ),
    "a server of stages": (
        {"parallel": {"data_reduction": "parameter_server"}, "mesh": {"pipe": 2}},
        "mesh.pipe",
        "stages store stacks of layers",
    ),
    "a ring's wire said twice": (
        {"parallel": {"data_reduction": "ring"}, "communication_data_type": "bf16"},
        "communication_data_type",
        "parallel.ring_wire",
    ),
    "a ring each micro-batch where gradients are unsharded": (
        {"parallel": {"data_reduction": "ring", "gradient_reduction": "micro_batch"}},
        "parallel.gradient_reduction",
        "reduces once per step",
    ),
    "int8 with nowhere for its error": (
        {"parallel": {"data_reduction": "ring", "ring_wire": "int8"}, **zero(stage=3)},
        "parallel.ring_wire",
        'write "bf16" or "none", or another stage',
    ),
    "a ring of what leaves for the host": (
        {
            "parallel": {"data_reduction": "ring"},
            **zero(stage=3, offload_param={"device": "cpu"}),
        },
        "zero_optimization.offload_param.device",
        "a ring needs them together on the devices",
    ),
    "a ring without sequence-parallel activations": (
        {"parallel": {"tensor_overlap": "ring"}},
        "parallel.tensor_overlap",
        "set parallel.sequence_parallel_activations",
    ),
    "a ring in both directions without sequence-parallel activations": (
        {"parallel": {"tensor_overlap": "ring_both_ways"}},
        "parallel.tensor_overlap",
        'or write "auto"',
    ),
    "overlap said twice": (
        {"parallel": {"tensor_overlap": "none"}, "tensor_parallel": {"tp_overlap_comm": True}},
        "tensor_parallel.tp_overlap_comm",
        "remove one",
    ),
    "stages said twice": (
        {"mesh": {"pipe": 2}, "pipeline": {"stages": 4}},
        "pipeline.stages",
        "found 4, while mesh.pipe is 2",
    ),
    "recomputation said twice": (
        {
            "parallel": {"pipeline_recompute": "save"},
            "pipeline": {"activation_checkpoint_interval": 2},
        },
        "pipeline.activation_checkpoint_interval",
        'found 2, while parallel.pipeline_recompute is "save"',
    ),
    "recomputation said twice, by its default": (
        {
            "parallel": {"pipeline_recompute": "stage"},
            "pipeline": {"activation_checkpoint_interval": 1},
        },
        "pipeline.activation_checkpoint_interval",
        'stands for parallel.pipeline_recompute "layers"',
    ),
    "chunks of a schedule that has none": (
        {"parallel": {"pipeline_schedule": "gpipe", "pipeline_chunks": 4}},
        "parallel.pipeline_chunks",
        'found 4 with parallel.pipeline_schedule "gpipe". Only parallel.pipeline_schedule '
        '"interleaved" has chunks',
    ),
    "too few micro-batches": (
        {
            "mesh": {"pipe": 4},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
        },
        "gradient_accumulation_steps",
        "Would work: gradient_accumulation_steps 4.",
    ),
    "coupled AdamW": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "adam_w_mode": False}}},
        "optimizer.params.adam_w_mode",
        'Write type "Adam"',
    ),
    "Nesterov without momentum": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}},
        "optimizer.params.nesterov",
        "a momentum above 0",
    ),
    "warm-up downwards": (
        schedule("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.01),
        "scheduler.params.warmup_min_lr",
        "Needs at most 0.01",
    ),
    "group without options": (
        {"optimizer": ADAM | {"groups": [{"pattern": "bias"}]}},
        "optimizer.groups.0",
        "lr_factor, weight_decay or frozen",
    ),
    "group of torch's path": (
        {"optimizer": ADAM | {"groups": [{"pattern": "blocks.0.bias", "frozen": True}]}},
        "optimizer.groups.0.pattern",
        "'blocks/0/bias'",
    ),
    "family and factory": (
        {"model": {"family": "gpt2", "factory": "a.b:c"}},
        "model",
        "exactly one of model.family, model.factory and model.pretrained",
    ),
    "factory without a name": (
        {"model": {"factory": "my_package.models"}},
        "model.factory",
        '"package.module:name"',
    ),
    "elastic and fixed batch": (
        {"train_batch_size": 8, "elasticity": {"enabled": True}},
        "train_batch_size",
        "ignore_non_elastic_batch_info",
    ),
    "micro-batch above the elastic batch": (
        {"elasticity": {"enabled": True, "max_train_batch_size": 4}},
        "elasticity.micro_batch_sizes",
        "found 6, above max_train_batch_size 4",
    ),
    # "auto" that nothing resolves.
    "auto clipping": ({"gradient_clipping": "auto"}, "gradient_clipping", "Write a value"),
    "auto rate": (adam(lr="auto"), "optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "auto steps": (
        schedule("WarmupDecayLR", total_num_steps="auto"),
        "scheduler.params.total_num_steps",
        "is resolved from run.steps",
    ),
    "auto batch alone": (
        {"train_batch_size": "auto"},
        "train_batch_size",
        "resolved from train_micro_batch_size_per_gpu, which the config does not set",
    ),
    "auto format": ({"bf16": {"enabled": "auto"}}, "bf16.enabled", "fp16.enabled true"),
    # Asked for and not built.
    "experts with servers": (
        {"mesh": {"expert": 2}, "parallel": {"data_reduction": "parameter_server"}},
        "mesh.expert",
        "each has all experts: write 1",
    ),
    "sequences with servers": (
        {"mesh": {"seq": 2}, "parallel": {"data_reduction": "parameter_server"}},
        "mesh.seq",
        "each has entire sequences: write 1",
    ),
    "sequences with rings": (
        {"sequence_parallel_size": 2, "parallel": {"data_reduction": "ring"}},
        "mesh.seq",
        "the loss of entire samples: write 1",
    ),
    "two sizes of seq": (
        {"mesh": {"seq": 4}, "sequence_parallel_size": 2},
        "sequence_parallel_size",
        "while mesh.seq is 4",
    ),
    "an unknown order of tokens": (
        {"mesh": {"seq": 2}, "parallel": {"sequence": {"layout": "striped"}}},
        "parallel.sequence.layout",
        "zigzag",
    ),
    "positions in dim 0": (
        {"parallel": {"sequence": {"dims": {"images": 0}}}},
        "parallel.sequence.dims.images",
        "at least 1",
    ),
    "an unknown kind of sequence": (
        {"parallel": {"sequence": {"kind": "context"}}},
        "parallel.sequence.kind",
        "ulysses",
    ),
    "offload to a disk without its folder": (
        zero(stage=2, offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer.nvme_path",
        "folder of a local disk",
    ),
    "offload to a disk with two buffers": (
        zero(offload_optimizer={"device": "nvme", "nvme_path": "/nvme", "buffer_count": 2}),
        "zero_optimization.offload_optimizer.buffer_count",
        "at least 3",
    ),
    "offload to a disk by two keys": (
        zero(cpu_offload=True, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"}),
        "zero_optimization.cpu_offload",
        "make them equal",
    ),
    "servers with state on a disk": (
        zero(offload_optimizer={"device": "nvme", "nvme_path": "/nvme"})
        | {"parallel": {"data_reduction": "parameter_server"}},
        "zero_optimization.offload_optimizer.device",
        "Servers store state in memory",
    ),
    "offload of parameters": (
        zero(stage=3, offload_param={"device": "nvme"}),
        "zero_optimization.offload_param.device",
        'Write "cpu"',
    ),
    "offload of parameters by two keys": (
        zero(cpu_offload_param=True, offload_param={"device": "none"}),
        "zero_optimization.cpu_offload_param",
        "make them equal",
    ),
    "SuperOffload": (
        zero(offload_optimizer={"device": "cpu", "super_offload": True}),
        "zero_optimization.offload_optimizer.super_offload",
        "device cpu",
    ),
    "old and new key for offload": (
        zero(cpu_offload=True, offload_optimizer={"device": "none"}),
        "zero_optimization.cpu_offload",
        "make them equal",
    ),
    "second partition": (
        zero(stage=3, zero_hpz_partition_size=8),
        "zero_optimization.zero_hpz_partition_size",
        "mesh.replica x mesh.data",
    ),
    "quantised gathers": (
        zero(zero_quantized_weights=True),
        "zero_optimization.zero_quantized_weights",
        "not built",
    ),
    "recomputation": ({"parallel": {"remat": "half"}}, "parallel.remat", '"full"'),
    "no recomputation, and how it is kept": (
        {"parallel": {"remat": "none"}, "activation_checkpointing": {"cpu_checkpointing": True}},
        "activation_checkpointing.cpu_checkpointing",
        'write parallel.remat "full"',
    ),
    "a name twice": (
        {"parallel": {"remat": {"save": ["query"], "offload": ["query"]}}},
        "parallel.remat",
        "in one list",
    ),
    "a budget beside host memory": (
        {
            "parallel": {"remat": {"budget": "4 GB"}},
            "activation_checkpointing": {"cpu_checkpointing": True},
        },
        "activation_checkpointing.cpu_checkpointing",
        "remove one",
    ),
    "two numbers of checkpoints": (
        {
            "parallel": {"remat": {"every_n": 2}},
            "activation_checkpointing": {"number_checkpoints": 4},
        },
        "activation_checkpointing.number_checkpoints",
        "remove one",
    ),
    "moving what stages keep": (
        {
            "mesh": {"pipe": 2},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "parallel": {"remat": {"offload": ["query"]}, "pipeline_recompute": "save"},
        },
        "parallel.remat",
        "use save",
    ),
    "layers of another policy": (
        {
            "mesh": {"pipe": 2},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "parallel": {"remat": "dots", "pipeline_recompute": "layers"},
        },
        "parallel.pipeline_recompute",
        "make them equal",
    ),
    "Apex": ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp", '"bf16": {"enabled": true}'),
    "curriculum": ({"curriculum_learning": {"enabled": True}}, "curriculum_learning",
                   "Removed in DeepSpeed 0.19.8, and not built here"),
    "sparse attention by presence": ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention",
                                     "A model calls its attention itself"),
    "sparse gradients": ({"sparse_gradients": True}, "sparse_gradients", "dense arrays"),
    "AMSGrad": (adam(amsgrad=True), "optimizer.params.amsgrad", "Refused"),
    "clipping in the optimizer": (
        adam(max_grad_norm=1.0),
        "optimizer.params.max_grad_norm",
        "Write gradient_clipping",
    ),
    "a step counter in the config": (
        schedule("WarmupLR", warmup_max_lr=0.1, last_batch_iteration=5),
        "scheduler.params.last_batch_iteration",
        "in the train state",
    ),
    "files without a path": ({"data": {"source": "jsonl"}}, "data.path", "needs a path"),
    "a path that is not read": ({"data": {"path": "x"}}, "data.source", "to read the path"),
    "a source unknown": ({"data": {"source": "stdlb"}}, "data.source", "Needs one of"),
    "a dtype that is not read": (
        {"data": {"source": "jsonl", "path": "x", "dtype": "uint16"}},
        "data.dtype",
        "Only raw files",
    ),
    "two kinds of source": (
        {"data": {"source": "stdlib", "mixture": [{"source": "stdlib"}]}},
        "data.mixture",
        "into the mixture",
    ),
    "a URL for metrics": ({"run": {"output": "gs://b/x"}}, "run.output", "run.checkpoints"),
    "nothing to train on": ({"data": {"held_out": 1.0}}, "data.held_out", "less than 1"),
}  # fmt: skip


BAD["a seed that no program takes"] = (
    {"run": {"seed": 2**31}}, "run.seed", "at most 2147483647",
)  # fmt: skip
BAD["a folder with NUL"] = ({"run": {"output": "a\0b"}}, "run.output", "text without NUL")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_names_its_key_and_what_would_work(name):
    config, path, hint = BAD[name]
    with pytest.raises(ConfigError) as caught:
        Config.load(config)
    message = str(caught.value)
    assert message.startswith("1 problem in the config:"), message
    assert f"\n  - {path}: " in message
    assert hint in message


def test_there_are_at_least_forty_bad_configs():
    assert len(BAD) >= 40


def test_all_problems_come_in_one_error():
    config = {
        "train_batch_size": "8",
        "fp16": {"enabled": True, "enabeld": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": -1, "beta": 1}},
        "mesh": {"seq": 0},
        "gradient_clipping": "auto",
    }
    with pytest.raises(ConfigError) as caught:
        Config.load(config)
    *lines, advice = str(caught.value).splitlines()[1:]
    paths = {line[4:].partition(": ")[0] for line in lines}
    assert advice.startswith("Add --auto hf to the command")
    assert paths == {
        "train_batch_size",
        "fp16.enabled",
        "fp16.enabeld",
        "optimizer.params.lr",
        "optimizer.params.beta",
        "mesh.seq",
        "gradient_clipping",
    }


def test_a_wrong_key_is_not_echoed_by_the_combinations_it_is_part_of():
    with pytest.raises(ConfigError) as caught:
        Config.load({"mesh": {"tensor": "2"}, "tensor_parallel": {"autotp_size": 4}})
    assert "make them equal" not in str(caught.value)


@pytest.mark.parametrize("way", [Config.load, Config.model_validate, lambda tree: Config(**tree)])
def test_every_way_in_is_checked(way):
    with pytest.raises(ConfigError, match="train_batch_size"):
        way({"train_batch_size": 0})


def test_a_copy_is_checked_as_a_whole():
    config = Config(fp16={"enabled": True})
    with pytest.raises(ConfigError, match=r"fp16\.enabled"):
        config.model_copy(update={"bf16": {"enabled": True}})


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().train_batch_size = 8
