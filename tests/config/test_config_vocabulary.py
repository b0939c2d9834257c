"""Every key has one verdict, and the verdict is what the loader does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspeed.config
from jaxspeed.config import Config, explain_config
from jaxspeed.config.schema import Fp16, Settings
from jaxspeed.config.tensor_section import PartitionConfig
from jaxspeed.config.tree import PARAMS, VOCABULARY, read, schema_keys, section_in
from jaxspeed.config.types import Flag
from jaxspeed.config.verdicts import Key, judge
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

# DeepSpeed's vocabulary with its defaults, written out by hand: what no default is known of is ...
DEEPSPEED = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    "sparse_gradients": False,
    "optimizer.type": ...,
    "optimizer.params": ...,
    "scheduler.type": ...,
    "scheduler.params": ...,
    "fp16.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "fp16.auto_cast": False,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.enabled": False,
    "bf16.check_grad_overflow": True,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "bf16.immediate_grad_update": False,
    "data_types.grad_accum_dtype": None,
    "torch_autocast.enabled": False,
    "torch_autocast.dtype": None,
    "torch_autocast.lower_precision_safe_modules": None,
    "amp": None,
    "zero_optimization.stage": 0,
    "zero_optimization.reduce_bucket_size": 5e8,
    "zero_optimization.allgather_bucket_size": 5e8,
    "zero_optimization.overlap_comm": None,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.stage3_prefetch_bucket_size": 5e7,
    "zero_optimization.stage3_max_live_parameters": 1e9,
    "zero_optimization.stage3_max_reuse_distance": 1e9,
    "zero_optimization.sub_group_size": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": 1e5,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.pin_memory": True,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.cpu_offload": None,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.elastic_checkpoint": False,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.zenflow": None,
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.number_checkpoints": None,
    "activation_checkpointing.contiguous_memory_optimization": False,
    "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "activation_checkpointing.profile": False,
    "pipeline.stages": "auto",
    "pipeline.partition": "best",
    "pipeline.seed_layers": False,
    "pipeline.activation_checkpoint_interval": 0,
    "tensor_parallel.autotp_size": 0,
    "tensor_parallel.preset_model": None,
    "tensor_parallel.partition_config": None,
    "tensor_parallel.tp_overlap_comm": False,
    "expert_parallel.enabled": False,
    "expert_parallel.autoep_size": 1,
    "expert_parallel.use_grouped_mm": True,
    "expert_parallel.load_balance_coeff": 1e-3,
    "sequence_parallel_size": None,
    "data_parallel_size": None,
    "checkpoint.tag_validation": "Warn",
    "checkpoint.load_universal": False,
    "checkpoint.use_node_local_storage": False,
    "tensorboard.enabled": False,
    "tensorboard.output_path": "",
    "tensorboard.job_name": "DeepSpeedJobName",
    "csv_monitor.enabled": False,
    "csv_monitor.output_path": "",
    "csv_monitor.job_name": "DeepSpeedJobName",
    "wandb.enabled": False,
    "wandb.group": None,
    "wandb.team": None,
    "wandb.project": "deepspeed",
    "flops_profiler.enabled": False,
    "comms_logger.enabled": False,
    "elasticity.enabled": False,
    "elasticity.max_train_batch_size": 2000,
    "elasticity.micro_batch_sizes": [2, 4, 6],
    "elasticity.min_gpus": 1,
    "elasticity.max_gpus": 10000,
    "autotuning.enabled": False,
    "autotuning.fast": True,
    "autotuning.metric": "throughput",
    "autotuning.metric_path": None,
    "autotuning.mp_size": 1,
    "autotuning.min_train_batch_size": 1,
    "autotuning.max_train_batch_size": None,
    "autotuning.min_train_micro_batch_size_per_gpu": 1,
    "autotuning.max_train_micro_batch_size_per_gpu": 1024,
    "autotuning.num_tuning_micro_batch_sizes": 3,
    "autotuning.tuner_type": "gridsearch",
    "autotuning.tuner_early_stopping": 5,
    "autotuning.tuner_num_trials": 50,
    "autotuning.results_dir": "autotuning_results",
    "autotuning.exps_dir": "autotuning_exps",
    "autotuning.overwrite": True,
    "autotuning.start_profile_step": 3,
    "autotuning.end_profile_step": 5,
    "autotuning.arg_mappings": None,
    "autotuning.model_info": None,
    "autotuning.model_info_path": None,
    "progressive_layer_drop": None,
    "curriculum_learning": None,
    "data_efficiency": None,
    "compression_training": None,
    "eigenvalue": None,
    "aio.block_size": 1048576,
    "aio.queue_depth": 8,
    "aio.thread_count": 1,
    "aio.intra_op_parallelism": 1,
    "aio.single_submit": False,
    "aio.overlap_events": True,
    "aio.use_gds": False,
    "compile.deepcompile": False,
    "hybrid_engine.enabled": False,
    "hybrid_engine.max_out_tokens": 512,
    "hybrid_engine.inference_tp_size": 1,
    "hybrid_engine.release_inference_cache": False,
    "hybrid_engine.pin_parameters": True,
    "hybrid_engine.tp_gather_partition_size": 8,
    "hybrid_engine.enable_cuda_graph": False,
    "sparse_attention": None,
    "nebula": None,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "disable_allgather": False,
}

# One refused value for each refused key.
ASKING = {
    "managed_gradient_accumulation": False,
    "sparse_gradients": True,
    "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "elasticity.model_parallel_size": 2,
    "elasticity.num_gpus_per_node": 8,
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "tensor_parallel.partition_config.strict_mode": True,
    "expert_parallel.top_k": 4,
    "expert_parallel.score_func": "sigmoid",
    "expert_parallel.score_apply": "pre",
    "expert_parallel.route_norm": True,
    "expert_parallel.route_scale": 2.0,
    "expert_parallel.routed_scaling_factor": 2.5,
    "expert_parallel.num_expert_groups": 8,
    "expert_parallel.num_limited_groups": 4,
    "expert_parallel.load_balance_coeff": 0.01,
    "sparse_attention": {"mode": "fixed"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
}


def nested(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def undeclared(section, prefix=""):
    """Paths of the fields that are neither declared with a verdict nor sections."""
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = section_in(field.annotation)
        if isinstance(field.json_schema_extra, Key):
            continue
        if inner is None and path not in PARAMS:
            yield path
        for each in [inner] if inner else PARAMS.get(path, {}).values():
            yield from undeclared(each, f"{path}.")


def test_every_field_of_the_schema_is_declared_with_a_verdict():
    assert list(undeclared(Settings)) == []

    class Missing(Fp16):
        more: Flag = False

    assert list(undeclared(Missing)) == ["more"]


def test_a_parameter_of_several_optimizers_or_schedules_has_one_declaration():
    for path, key in schema_keys():
        declared = (VOCABULARY[path].verdict, VOCABULARY[path].sentence)
        assert declared == (key.verdict, key.sentence), path


def test_every_row_has_a_sentence():
    assert all(key.sentence.rstrip().endswith(".") for key in VOCABULARY.values())


# AutoTPConfig and TPLayerSpec of deepspeed/module_inject/autotp_config.py.
PARTITION = {
    "layer_specs": [],
    "use_default_specs": True,
    "strict_mode": False,
    "tp_size": 1,
    "embedding_partition_dim": 1,
    "lm_head_patterns": ["lm_head", "embed_out"],
}


def test_partition_config_has_deepspeeds_keys_and_defaults():
    assert Config(tensor_parallel={"partition_config": {}}).tensor_parallel.partition_config == (
        PartitionConfig(**PARTITION)
    )
    assert list(PartitionConfig.model_fields) == list(PARTITION)


@pytest.mark.parametrize("path", DEEPSPEED)
def test_deepspeeds_key_is_known_and_has_its_default(path):
    assert path in VOCABULARY or any(known.startswith(f"{path}.") for known in VOCABULARY)
    if DEEPSPEED[path] is not ...:
        assert read(Config(), path, "not there") == DEEPSPEED[path]


def test_defaults_ask_for_nothing_that_is_refused():
    config = Config()
    for path, key in VOCABULARY.items():
        if "params" not in path and not path.startswith("optimizer."):
            value = read(config, path)
            verdict, _ = judge(key, value, lambda other: read(config, other))
            assert verdict != "refused" or value is None, path


REFUSED = [
    path
    for path, key in VOCABULARY.items()
    if key.verdict == "refused" and key.when is None and "params" not in path
]


def test_the_values_that_are_refused_are_of_refused_keys():
    assert ASKING.keys() - set(REFUSED) == set()


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused_is_an_error_and_says_why(path):
    default = {"enabled": True} if read(Config(), path) is None else True
    with pytest.raises(ConfigError) as caught:
        Config.load(nested(path, ASKING.get(path, default)))
    assert f"  - {path}: found " in str(caught.value)
    assert VOCABULARY[path].sentence in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"compression_training": {"weight_quantization": {"enabled": False, "bits": 8}}},
        {"curriculum_learning": {"enabled": False, "params": {"enabled": True}}},
        {"aio": {"block_size": 1048576, "queue_depth": 8}},
        {"compile": {"deepcompile": False}},
        {"flops_profiler": {"enabled": False, "profile_step": 5}},
        {"wandb": {"enabled": False, "project": "mine"}},
        {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": False}}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"autotuning": {}},
        {"autotuning": {"enabled": False, "mp_size": 4}},
        {"hybrid_engine": {"enabled": False, "inference_tp_size": 2}},
    ],
)
def test_what_is_switched_off_is_accepted(section):
    assert Config.load(section)
    assert all(row.verdict != "refused" for row in explain_config(section))


def test_an_engine_that_samples_is_always_there_but_without_a_sharding_of_its_own():
    """The section that DeepSpeed-Chat writes."""
    section = {"enabled": True, "max_out_tokens": 512, "inference_tp_size": 2}
    section |= {"release_inference_cache": True, "pin_parameters": False}
    section |= {"tp_gather_partition_size": 8}
    rows = {row.key: row for row in explain_config({"hybrid_engine": section})}
    verdicts = {name: rows[f"hybrid_engine.{name}"].verdict for name in section}
    wanted = dict.fromkeys(section, "harmless") | {"inference_tp_size": "approximated"}
    assert verdicts == wanted


def test_the_folder_imports_nothing_heavy():
    allowed = {"pydantic", "pydantic_core", "yaml", "jaxspeed"} | sys.stdlib_module_names
    own = ("jaxspeed.axes", "jaxspeed.config", "jaxspeed.errors", "jaxspeed.lazy_names")
    own += ("jaxspeed.near_words",)
    folder = Path(jaxspeed.config.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in allowed, (file.name, name)
                if name.startswith("jaxspeed"):
                    assert name.startswith(own), file.name


def test_yaml_is_only_imported_to_read_yaml():
    code = "import jaxspeed.errors, sys; before = 'yaml' in sys.modules; import jaxspeed.config; "
    code += "jaxspeed.config.examine({}); sys.exit('yaml' in sys.modules and not before)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
