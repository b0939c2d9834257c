"""Verdicts on ZeRO and offload keys, reports, sections not built, and model, data and run."""

from jaxspeed.config.verdicts import Entry, alike, refused, refused_section, rows

STAGE3 = ("zero_optimization.stage", (3,))
_OFFLOAD = "zero_optimization.offload_"
_PARAM_OFFLOADED = (f"{_OFFLOAD}param.device", ("cpu",))
_OPTIMIZER_OFFLOADED = (f"{_OFFLOAD}optimizer.device", ("cpu",))

ZERO: tuple[Entry, ...] = (
    *rows(
        "zero_optimization",
        "honoured",
        {
            "stage": "State sharded over data: 1 masters and moments, 2 also gradients, 3 also "
            "parameters.",
            "mics_shard_size": "Sets mesh.data to this and mesh.replica to the rest, so that each "
            "group of so many devices holds one copy.",
        },
    ),
    Entry(
        "zero_optimization.stage3_param_persistence_threshold",
        "honoured",
        "Under stage 3, parameters with fewer elements than this stay replicated; with "
        "offload_param, parameters with fewer per layer stay on the device.",
    ),
    *alike(
        "zero_optimization",
        "harmless",
        "An option of DeepSpeed's runtime; XLA schedules collectives and buffers.",
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
            "elastic_checkpoint": "Arrays are global, independent of the number of devices.",
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
        "A secondary partition of the weights is not built; mesh.replica x mesh.data keeps all of "
        "ZeRO's communication inside a group.",
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
        "cpu: masters, moments and the moving average are offloaded to pinned host memory, and "
        "streamed through the device by the update. none: they stay on the device.",
    ),
    Entry(
        f"{_OFFLOAD}optimizer.ratio",
        "honoured",
        "The share of the parameters, in bytes and the largest first, whose masters and moments "
        "are offloaded.",
        when=_OPTIMIZER_OFFLOADED,
    ),
    Entry(
        f"{_OFFLOAD}optimizer.where",
        "honoured",
        "Where offloaded state is updated: on the device, through which it is streamed, or on the "
        "host's cores, as in DeepSpeed: gradients are transferred there, and only parameters back.",
        when=_OPTIMIZER_OFFLOADED,
    ),
    Entry(
        f"{_OFFLOAD}optimizer.pin_memory",
        "approximated",
        "Always on: host transfers inside of the step need pinned memory.",
        when=_OPTIMIZER_OFFLOADED,
    ),
    *alike(
        f"{_OFFLOAD}optimizer",
        "harmless",
        "An option of DeepSpeed's runtime; XLA schedules host transfers.",
        "buffer_count pipeline_read pipeline_write pipeline fast_init",
        when=_OPTIMIZER_OFFLOADED,
    ),
    *rows(
        f"{_OFFLOAD}optimizer",
        "harmless",
        {
            "nvme_path": "Only for device nvme, which is refused.",
            "cpuadam_cores_perc": "XLA chooses the number of host cores for an update (where).",
        },
        when=_OPTIMIZER_OFFLOADED,
    ),
    refused(
        f"{_OFFLOAD}optimizer.super_offload",
        "SuperOffload is not built; device cpu streams the update through the device.",
        False,
    ),
    Entry(
        "zero_optimization.cpu_offload",
        "honoured",
        "DeepSpeed's old key for offload_optimizer.device: true is cpu.",
    ),
    Entry(
        "zero_optimization.cpu_offload_param",
        "honoured",
        "DeepSpeed's old key for offload_param.device: true is cpu.",
    ),
    Entry(
        f"{_OFFLOAD}param.device",
        "honoured",
        "cpu: parameters are offloaded to pinned host memory, at any stage, and streamed unit by "
        "unit to the device for both passes; gradients are offloaded as they are computed. none: "
        "all stay on the device.",
    ),
    Entry(
        f"{_OFFLOAD}param.pin_memory",
        "approximated",
        "Always on: host transfers inside of the step need pinned memory.",
        when=_PARAM_OFFLOADED,
    ),
    *alike(
        f"{_OFFLOAD}param",
        "harmless",
        "An option of DeepSpeed's runtime for NVMe; XLA schedules host transfers.",
        "nvme_path buffer_count buffer_size max_in_cpu",
        when=_PARAM_OFFLOADED,
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
    "flops_profiler": "use engine.compiled(batch).flops",
    "comms_logger": "use engine.compiled(batch).collectives",
}
_MONITOR_OF = (
    "Written by jaxspeed train, in addition to metrics.jsonl; with a loop of your own, "
    "engine.add_hook gets the same numbers."
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
    refused_section("comet", "Not built; engine.add_hook gets the numbers to log."),
    Entry("timers", "harmless", "wall_clock_breakdown times the steps."),
    Entry("log_level", "harmless", 'Set it on Python\'s logger "jaxspeed".'),
    *rows(
        "checkpoint",
        "harmless",
        {
            "tag_validation": "One program runs on all processes, so they agree on the tag.",
            "load_universal": "Always on: a checkpoint can be restored onto any mesh.",
        },
    ),
    refused(
        "checkpoint.use_node_local_storage",
        "A checkpoint is one folder shared by all processes; remove it.",
        False,
    ),
    refused(
        "checkpoint.parallel_write",
        "Always on: each process writes its own shards; remove it.",
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
    refused("graph_harvesting", "XLA decides on CUDA graphs; remove it.", False),
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
            "paths": "A list of such paths.",
            "text_field": "The field of a record with its text.",
            "split": "The split of a data set on Hugging Face.",
            "samples": "Number of samples of a synthetic source, or taken from an iterable.",
            "mixture.weight": "Weight of this source in the mixture, relative to the others.",
            **{
                f"mixture.{key}": "As in data, for one source of a mixture."
                for key in ("source", "path", "paths", "text_field", "split", "samples")
            },
            "tokenizer": "bytes, bpe (trained on the corpus and saved with the run), or the path "
            "of a tokenizer.json.",
            "vocab_size": "Vocabulary size of bpe; the model's by default.",
            "seq_len": "Tokens per sample; the model's positions by default.",
            "document_masks": "No attention and no prediction across documents in one sample.",
            "held_out": "The share of the samples held out for evaluation.",
            "shuffle": "A new order each epoch, a function of seed and step only.",
            "seed": "Seed of the order; run.seed by default.",
            "prefetch": "Number of batches transferred to the devices ahead of the step.",
        },
    ),
    *rows(
        "run",
        "honoured",
        {
            "devices": "Platform: cpu, gpu or tpu, or simulated devices such as cpu:8; by default "
            "what JAX finds.",
            "steps": "Total optimizer steps, also of a resumed run.",
            "seed": "Seed of the initial weights and of every random stream.",
            "output": "The folder of the run: its config, metrics, checkpoints and loss curve.",
            "checkpoints": "Location of checkpoints, a folder or a gs:// or s3:// URL; by default "
            "in the run's folder.",
            "init_from": "The folder of a run; weights are initialized from its newest checkpoint, "
            "optimizer and step start anew.",
            "compilation_cache": "Persistent cache of compiled programs: true in the user's cache "
            "folder, a path in the folder of this path, false none.",
            "executable": "A file of `jaxspeed plan --compile --keep`, from which the step starts "
            "without compilation. Loading it executes its code: only from a trusted source.",
            "eval_every": "Steps between evaluations on held-out samples; always one at the end.",
            "eval_batches": "Batches per evaluation; by default all.",
            "checkpoint_every": "Steps between checkpoints; a tenth of the run by default, at "
            "most 1000. There is always one at the end.",
            "keep": "Number of newest checkpoints retained.",
            "keep_every": "Checkpoints at multiples of this many steps are retained forever.",
            "max_skipped": "Consecutive skipped steps after which the run stops with a diagnosis.",
            "profile_step": "First step of a trace for xprof.",
            "profile_steps": "Number of steps in the trace.",
            "sample_tokens": "Length of the sample that a language model generates at the end.",
            "sample_prompt": "Prompt of the sample.",
            "sample_temperature": "Temperature of the sample; 0 is greedy.",
        },
    ),
)
