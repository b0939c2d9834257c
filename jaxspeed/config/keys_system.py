"""Verdicts on ZeRO, reports, what is not built, and the own sections."""

from jaxspeed.config.verdicts import Entry, alike, refused, refused_section, rows

STAGE3 = ("zero_optimization.stage", (3,))
_OFFLOAD = "zero_optimization.offload_"
_PARAM_WAITS = (f"{_OFFLOAD}param.device", ("cpu",))
_OPTIMIZER_WAITS = (f"{_OFFLOAD}optimizer.device", ("cpu",))

ZERO: tuple[Entry, ...] = (
    *rows(
        "zero_optimization",
        "honoured",
        {
            "stage": "What is cut over the data axis: 1 the masters and moments, 2 the gradients "
            "too, 3 the parameters too.",
            "mics_shard_size": "Sets mesh.data to this and mesh.replica to what remains, so that "
            "each group of so many devices holds one copy.",
        },
    ),
    Entry(
        "zero_optimization.stage3_param_persistence_threshold",
        "honoured",
        "Under stage 3 leaves of fewer elements than this stay replicated; with offload_param "
        "parameters of which a layer has fewer stay on the device.",
    ),
    *alike(
        "zero_optimization",
        "harmless",
        "A knob of DeepSpeed's runtime; XLA schedules collectives and buffers.",
        "reduce_bucket_size allgather_bucket_size overlap_comm contiguous_gradients reduce_scatter "
        "allgather_partitions use_multi_rank_bucket_allreduce round_robin_gradients "
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential sub_group_size "
        "mics_hierarchical_params_gather legacy_stage1 memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory",
    ),
    *rows(
        "zero_optimization",
        "harmless",
        {
            "ignore_unused_parameters": "An unused parameter has a gradient of zero here.",
            "elastic_checkpoint": "Arrays are global: they are not bound to a number of devices.",
            "load_from_fp32_weights": "The fp32 masters are the stored weights.",
            "stage3_gather_16bit_weights_on_model_save": "Arrays are global: a save needs no "
            "gathering in advance.",
            "stage3_gather_fp16_weights_on_model_save": "Arrays are global: a save needs no "
            "gathering in advance.",
            "leaf_module": "Units are found or named by parallel.units.",
            "cpu_offload_use_pin_memory": "Host memory is pinned in any case.",
        },
    ),
    refused(
        "zero_optimization.zero_hpz_partition_size",
        "A second partition of the weights is not built; mesh.replica x mesh.data keeps all of "
        "ZeRO inside a group.",
        0,
        1,
    ),
    *[
        refused(f"zero_optimization.{key}", f"Quantised {what} are not built; remove it.", False)
        for key, what in {
            "zero_quantized_weights": "gathers",
            "zero_quantized_nontrainable_weights": "weights",
            "zero_quantized_gradients": "reductions",
        }.items()
    ],
    refused("zero_optimization.zeropp_loco_param", "Quantised reductions are not built.", None, {}),
    refused_section("zero_optimization.zenflow", "ZenFlow is not built; remove it."),
    Entry(
        f"{_OFFLOAD}optimizer.device",
        "honoured",
        "cpu: masters, moments and the moving average wait in pinned host memory, and the update "
        "brings them to the device a piece at a time. none: they stay on the device.",
    ),
    Entry(
        f"{_OFFLOAD}optimizer.ratio",
        "honoured",
        "The share of the parameters, in bytes and the largest first, whose masters and moments "
        "wait in host memory.",
        when=_OPTIMIZER_WAITS,
    ),
    Entry(
        f"{_OFFLOAD}optimizer.where",
        "honoured",
        "What updates that which waits: the device, to which it comes a piece at a time, or the "
        "host's cores, as in DeepSpeed: gradients go to them, and only parameters come back.",
        when=_OPTIMIZER_WAITS,
    ),
    Entry(
        f"{_OFFLOAD}optimizer.pin_memory",
        "approximated",
        "Host memory is pinned in any case: the step's own program moves nothing else.",
        when=_OPTIMIZER_WAITS,
    ),
    *alike(
        f"{_OFFLOAD}optimizer",
        "harmless",
        "A knob of DeepSpeed's runtime; XLA schedules what is moved.",
        "buffer_count pipeline_read pipeline_write pipeline fast_init",
        when=_OPTIMIZER_WAITS,
    ),
    *rows(
        f"{_OFFLOAD}optimizer",
        "harmless",
        {
            "nvme_path": "Read only with device nvme, which is refused.",
            "cpuadam_cores_perc": "How many of the host's cores update (where) is XLA's choice.",
        },
        when=_OPTIMIZER_WAITS,
    ),
    refused(
        f"{_OFFLOAD}optimizer.super_offload",
        "SuperOffload is not built; device cpu streams the update through the device.",
        False,
    ),
    Entry(
        "zero_optimization.cpu_offload",
        "honoured",
        "DeepSpeed's old word for offload_optimizer.device: true is cpu.",
    ),
    Entry(
        "zero_optimization.cpu_offload_param",
        "honoured",
        "DeepSpeed's old word for offload_param.device: true is cpu.",
    ),
    Entry(
        f"{_OFFLOAD}param.device",
        "honoured",
        "cpu: parameters wait in pinned host memory, at any stage; each unit's come to the device "
        "for its two passes, and their gradients leave as they are made. none: all stay "
        "on the device.",
    ),
    Entry(
        f"{_OFFLOAD}param.pin_memory",
        "approximated",
        "Host memory is pinned in any case: the step's own program moves nothing else.",
        when=_PARAM_WAITS,
    ),
    *alike(
        f"{_OFFLOAD}param",
        "harmless",
        "A knob of DeepSpeed's runtime for NVMe; XLA schedules what is moved.",
        "nvme_path buffer_count buffer_size max_in_cpu",
        when=_PARAM_WAITS,
    ),
    *alike(
        "",
        "harmless",
        "Any optimizer works at any stage.",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
)

_PROFILERS = {
    "flops_profiler": "recompute_fwd_factor profile_step module_depth top_modules detailed "
    "output_file",
    "comms_logger": "verbose prof_all debug prof_ops",
}
_PROFILERS_INSTEAD = {
    "flops_profiler": "engine.compiled(batch).flops has the number",
    "comms_logger": "engine.compiled(batch).collectives has them",
}
_MONITOR_OF = (
    "Written by the run loop (jaxspeed train), beside its metrics.jsonl; with batches of your own, "
    "engine.add_hook is given the same numbers."
)

REPORTS: tuple[Entry, ...] = (
    *[
        entry
        for section, keys in (
            ("tensorboard", "enabled output_path job_name"),
            ("csv_monitor", "enabled output_path job_name"),
            ("wandb", "enabled group team project"),
        )
        for entry in alike(section, "honoured", _MONITOR_OF, keys)
    ],
    *[
        refused(f"{section}.enabled", f"Not built; {instead}.", False)
        for section, instead in _PROFILERS_INSTEAD.items()
    ],
    *[
        entry
        for section, keys in _PROFILERS.items()
        for entry in alike(
            section, "refused", "Not built.", keys, when=(f"{section}.enabled", (True,))
        )
    ],
    refused_section("comet", "Not built; engine.add_hook is given what to log."),
    Entry("timers", "harmless", "Steps are timed when wall_clock_breakdown is set."),
    Entry("log_level", "harmless", 'Set it on Python\'s logger "jaxspeed".'),
    *rows(
        "checkpoint",
        "harmless",
        {
            "tag_validation": "One program runs on all processes, so they agree on the tag.",
            "load_universal": "Always so: a checkpoint is restored onto any mesh.",
        },
    ),
    refused(
        "checkpoint.use_node_local_storage",
        "A checkpoint is one folder that all processes share; remove it.",
        False,
    ),
    refused(
        "checkpoint.parallel_write",
        "Each process writes its own shards always; remove it.",
        None,
        {},
    ),
)

UNBUILT: tuple[Entry, ...] = (
    Entry(
        "aio",
        "refused",
        "NVMe offload is not built; remove it.",
        off_if=lambda section: (
            not section or not (section.get("enabled") or section.get("use_gds"))
        ),
    ),
    Entry(
        "compile",
        "refused",
        "DeepCompile is for torch; the step is always compiled. Remove it.",
        off_if=lambda section: (
            not section or not any(section.get(key) for key in ("enabled", "deepcompile"))
        ),
    ),
    refused_section("hybrid_engine", "Not built; remove it."),
    refused_section("sparse_attention", "Not built; a model calls its attention itself."),
    refused_section("nebula", "Azure's checkpoint service is not built; remove it."),
    refused_section("datastates_ckpt", "Not built; remove it."),
    refused("graph_harvesting", "CUDA graphs are XLA's business; remove it.", False),
    *[
        refused_section(section, "Not built; remove it.")
        for section in (
            "progressive_layer_drop",
            "curriculum_learning",
            "data_efficiency",
            "compression_training",
            "quantize_training",
            "weight_quantization",
            "eigenvalue",
        )
    ],
)

OWN: tuple[Entry, ...] = (
    *rows(
        "model",
        "honoured",
        {
            "family": "The registered family to build, such as gpt2, llama, vit or mlp.",
            "factory": "The import path of a factory, package.module:name.",
            "preset": "The family's sizes by name; model.config overrides them.",
            "config": "The family's or factory's own arguments.",
        },
    ),
    *rows(
        "data",
        "honoured",
        {
            "source": "stdlib (the default), text, jsonl, parquet, huggingface, tokens, images, "
            "synthetic, or the import path of an iterable, package.module:name.",
            "path": "A file, a folder or a glob; the name of a data set on Hugging Face.",
            "paths": "Several of them.",
            "text_field": "The field of a record that holds its text.",
            "split": "The split of a data set on Hugging Face.",
            "samples": "How many samples a synthetic source has, or are taken of an iterable.",
            "mixture.weight": "The share of the samples that this source has, beside the others'.",
            **{
                f"mixture.{key}": "As in data, for one source of a mixture."
                for key in ("source", "path", "paths", "text_field", "split", "samples")
            },
            "tokenizer": "bytes, bpe (trained on the corpus and kept with the run), or the path "
            "of a tokenizer.json.",
            "vocab_size": "The number of tokens that bpe learns; the model's own by default.",
            "seq_len": "Tokens that a sample predicts; the model's positions by default.",
            "document_masks": "No attention and no prediction across documents in one sample.",
            "held_out": "The share of the samples that is kept for evaluation.",
            "shuffle": "A new order each epoch, a function of seed and step alone.",
            "seed": "Seeds the order; run.seed by default.",
            "prefetch": "Batches that are placed on the devices ahead of the step.",
        },
    ),
    *rows(
        "run",
        "honoured",
        {
            "devices": "Which devices: cpu, gpu or tpu, or a number of simulated ones as in cpu:8; "
            "what JAX finds by default.",
            "steps": "Optimizer steps in all; a run that is continued goes on to here.",
            "seed": "Seeds the initial weights and every random stream.",
            "output": "The folder of the run: its config, metrics, checkpoints and loss curve.",
            "checkpoints": "Where checkpoints lie, a folder or a gs:// or s3:// URL; in the run's "
            "folder by default.",
            "init_from": "The folder of a run whose newest weights this one begins with; the "
            "optimizer and the step begin anew.",
            "compilation_cache": "Keeps compiled programs: true in the user's cache folder, a "
            "path in that one, false not at all.",
            "executable": "A file of `jaxspeed plan --compile --keep`, from which the step starts "
            "without compilation. Loading it runs what is in it: only from whom you trust.",
            "eval_every": "Steps between evaluations on held-out samples; the end has one always.",
            "eval_batches": "Batches of an evaluation; all that there are by default.",
            "checkpoint_every": "Steps between checkpoints; a tenth of the run by default, at "
            "most 1000. The end has one always.",
            "keep": "How many of the newest checkpoints are kept.",
            "keep_every": "Checkpoints at multiples of so many steps are kept for good.",
            "max_skipped": "The run ends with a diagnosis after so many skipped steps in a row.",
            "profile_step": "The step at which a trace for xprof begins.",
            "profile_steps": "The steps that the trace holds.",
            "sample_tokens": "Tokens of the sample that a language model writes at the end.",
            "sample_prompt": "What the sample begins with.",
            "sample_temperature": "0 takes the likeliest token each time.",
        },
    ),
)
