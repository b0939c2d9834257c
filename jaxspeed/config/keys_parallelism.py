"""Verdicts on mesh, parallelism, rematerialization and pipeline keys."""

from jaxspeed.config.verdicts import Entry, alike, refused, refused_section, rows

# With one device on the axis nothing is sharded.
ONE_PART = ("mesh.tensor", (1,))

_UNBUILT_AXIS = "This axis is not built; leave it at 1 and put the devices on data or tensor."

PARALLELISM: tuple[Entry, ...] = (
    *rows(
        "mesh",
        "honoured",
        {
            "pipe": "Number of pipeline stages, over which the model's repeated blocks are "
            "partitioned.",
            "replica": "Replicas of the ZeRO-sharded state; a data axis for the batch.",
            "data": "The batch and ZeRO's state are sharded over it.",
            "tensor": "Weights are sharded over it: by layer_specs or a preset, by the model's "
            "logical axes, or as inferred from the traced program.",
        },
    ),
    *[refused(f"mesh.{axis}", _UNBUILT_AXIS, 1) for axis in ("seq", "expert")],
    *rows(
        "parallel",
        "honoured",
        {
            "units": "The modules whose weights ZeRO 3 gathers one at a time, as path patterns; "
            "by default the repeated modules.",
            "full_precision": "Parameters that are never cast, as path patterns.",
            "state_collections": "State carried between steps besides parameters: names of Linen "
            "collections or nnx Variable types; by default all but sown and intermediate values.",
            "logical_axes": "Dim names of parameters whose model has none, by path pattern: "
            '{"**/up/kernel": ["embed", "mlp"]}.',
            "axis_names": "Mesh axes by which a model annotates its parameters, and what they are "
            'here: {"mp": "tensor", "fsdp": "data"}; tp, mp and model are tensor by default. '
            'What is "data" or null is left to the config.',
            "gradient_reduction": 'When gradients are reduced over data ranks: once a "step" '
            '(stages 0 and 1), every "micro_batch", or "auto".',
            "data_reduction": 'How gradients are summed over data ranks: "xla" by its collectives, '
            '"ring" by ring all-reduces with a documented order of summation, "parameter_server" '
            "by devices that own the parameters.",
        },
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "ring_directions": '"both" sends half of each chunk in each direction, "one" all of it '
            "in one.",
            "ring_wire": 'Format of ring messages: "none" (the gradients\' dtype), "bf16", or '
            '"int8" in blocks with error feedback.',
            "ring_bucket_bytes": "Gradients are fused into buckets of about this many bytes, one "
            'ring each; text such as "32 MiB" works too.',
        },
        when=("parallel.data_reduction", ("ring",)),
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "servers": "Number of devices that own the parameters and the optimizer state; the "
            "others are workers.",
            "max_staleness": "Asynchronous workers; no gradient that is more than this many "
            "versions old is applied. null: synchronous.",
            "worker_pace": "Simulated compute time of each worker, for studies; by default 1.",
        },
        when=("parallel.data_reduction", ("parameter_server",)),
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "on_stale": 'A push that would be too old is prevented ("wait": its worker waits '
            'before it pulls), or dropped and counted ("drop").',
            "staleness_decay": "A gradient of staleness t is scaled by this to the power t.",
        },
        when=("parallel.data_reduction", ("parameter_server",)),
        unless=("parallel.max_staleness", (None,)),
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "sequence_parallel_activations": "Activations between sharded matmuls are sharded "
            "along the sequence over tensor.",
            "tensor_overlap": 'Overlap of tensor-parallel collectives with matmuls: "ring" (a '
            'collective matmul), "ring_both_ways" (in both directions), "none"; "auto" is the '
            "best for the platform.",
            "infer_tensor_cuts": '"auto" infers the tensor sharding from the traced program if '
            'neither model nor config sets it; "never" leaves the weights replicated.',
        },
        unless=ONE_PART,
    ),
    Entry("data_parallel_size", "honoured", "The size of mesh.replica x mesh.data."),
    refused("sequence_parallel_size", "The seq axis is not built; remove it or write 1.", 1, None),
    Entry("tensor_parallel.autotp_size", "honoured", "The size of mesh.tensor; 0 does not set it."),
    Entry(
        "tensor_parallel.preset_model",
        "honoured",
        "Shards the modules of a family by their usual names: gpt2, llama or vit.",
        when=("tensor_parallel.partition_config.use_default_specs", (True, None)),
        unless=ONE_PART,
    ),
    *rows(
        "tensor_parallel.partition_config",
        "honoured",
        {
            "layer_specs": "Tensor sharding of weights: a mapping from path patterns to column, "
            "row, vocabulary or replicated, or DeepSpeed's list. The first that covers a weight "
            "applies, and overrides the model's logical axes.",
            "use_default_specs": "The preset's specs follow layer_specs; false omits them.",
        },
        unless=ONE_PART,
    ),
    refused(
        "tensor_parallel.partition_config.strict_mode",
        "Not built: the placement table shows the replicated weights; remove it.",
        False,
    ),
    *rows(
        "tensor_parallel.partition_config",
        "harmless",
        {
            "tp_size": "DeepSpeed overwrites it with tensor_parallel.autotp_size, which applies "
            "here too.",
            "embedding_partition_dim": "DeepSpeed does not read it; vocabulary in layer_specs "
            "shards an embedding.",
            "lm_head_patterns": "Arrays are global: a head needs no special layer. vocabulary in "
            "layer_specs shards it.",
        },
    ),
    Entry(
        "tensor_parallel.tp_overlap_comm",
        "approximated",
        'With parallel.sequence_parallel_activations the same as parallel.tensor_overlap "ring"; '
        "otherwise no effect: XLA overlaps what it can.",
        unless=ONE_PART,
    ),
    refused_section("expert_parallel", "The expert axis is not built; remove it."),
    Entry("use_data_before_expert_parallelism", "harmless", "The expert axis is always 1."),
    Entry(
        "parallel.remat",
        "honoured",
        "Residuals that each unit (the repeated module) saves for its backward pass, which "
        'recomputes the rest: "none" recomputes nothing, "full" all but its input, "dots" saves '
        'matmuls with weights, "attention" the output of attention, so that its kernel runs '
        'forward once; {"every_n": k} saves the input of every k-th unit, {"budget": bytes} what '
        'is most expensive to recompute within so many bytes per device, and {"save": [...], '
        '"offload": [...]} the activations of these names.',
    ),
    *rows(
        "activation_checkpointing",
        "honoured",
        {
            "cpu_checkpointing": "Saved residuals are offloaded to host memory; without "
            'parallel.remat those of "full".',
            "number_checkpoints": "Number of units that save their input: parallel.remat every_n, "
            "by count.",
        },
    ),
    Entry(
        "activation_checkpointing.partition_activations",
        "honoured",
        "Saved residuals are sharded over tensor, and gathered in the backward pass.",
        unless=ONE_PART,
    ),
    *alike(
        "activation_checkpointing",
        "harmless",
        "An option of DeepSpeed's runtime; XLA plans the buffers.",
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    ),
)


# With one stage there is no pipeline.
ONE_STAGE = ("mesh.pipe", (1,))

PIPELINE: tuple[Entry, ...] = (
    *rows(
        "parallel",
        "honoured",
        {
            "pipeline_schedule": 'Order of micro-batches in the stages: "1f1b", one forward and '
            'one backward alternate; "gpipe", all forwards first, which saves the inputs of every '
            'micro-batch; "interleaved", 1f1b with several chunks of the model per device, for a '
            "smaller bubble.",
            "pipeline_recompute": 'What the backward pass of a stage recomputes: "stage" all but '
            'its input; "layers" the same, one layer at a time, for less memory and one more '
            'forward; "save" nothing.',
        },
        unless=ONE_STAGE,
    ),
    Entry(
        "parallel.pipeline_chunks",
        "honoured",
        "Number of chunks of the model per device.",
        when=("parallel.pipeline_schedule", ("interleaved",)),
        unless=ONE_STAGE,
    ),
    Entry(
        "parallel.pipeline_gather",
        "honoured",
        'When ZeRO 3 gathers a stage\'s weights: one layer at a time in every "tick", or all of '
        'them once per "step".',
        when=("zero_optimization.stage", (3,)),
        unless=ONE_STAGE,
    ),
    Entry("pipeline.stages", "honoured", 'The size of mesh.pipe; "auto" does not set it.'),
    *rows(
        "pipeline",
        "approximated",
        {
            "partition": "The blocks of a stack are equal, so that balancing layers, parameters "
            "or FLOPs gives the same stages. Embedding and head need no balancing, since all "
            "stages share them.",
            "activation_checkpoint_interval": 'Same as parallel.pipeline_recompute "layers": more '
            "than 1 counts as 1, since each layer is one checkpoint; 0 does not set it.",
            **dict.fromkeys(
                ("pipe_partitioned", "grad_partitioned"),
                "DeepSpeed partitions activations and gradients between stages over the "
                "model-parallel ranks, and gathers them on arrival. Here they are sharded over "
                "tensor with parallel.sequence_parallel_activations; otherwise XLA chooses.",
            ),
        },
        unless=ONE_STAGE,
    ),
    Entry(
        "pipeline.seed_layers",
        "harmless",
        "Each layer has its own random stream, independent of its stage.",
    ),
)
