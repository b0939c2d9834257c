"""Verdicts on the mesh, on what spreads a model over it, and on recomputation."""

from jaxspeed.config.verdicts import Entry, alike, refused, refused_section, rows

# With one device on the axis there is nothing to cut.
ONE_PART = ("mesh.tensor", (1,))

_UNBUILT_AXIS = "This axis is not built; leave it at 1 and put the devices on data or tensor."

PARALLELISM: tuple[Entry, ...] = (
    *rows(
        "mesh",
        "honoured",
        {
            "pipe": "The model's repeated blocks are cut into so many stages, which the "
            "micro-batches of a step pass one after another.",
            "replica": "Copies of the sharded state; a data axis for the batch.",
            "data": "The batch is cut over it, and ZeRO shards over it.",
            "tensor": "Weights are cut over it: by layer_specs or a preset, by the model's logical "
            "axes, or as is inferred.",
        },
    ),
    *[refused(f"mesh.{axis}", _UNBUILT_AXIS, 1) for axis in ("seq", "expert")],
    *rows(
        "parallel",
        "honoured",
        {
            "units": "The modules whose weights ZeRO 3 gathers one at a time, as path patterns; "
            "by default they are found.",
            "full_precision": "Parameters that are never cast, as path patterns.",
            "state_collections": "What is carried from step to step beside parameters: Linen "
            "collections or nnx Variable types by name; by default all but sown and intermediate "
            "values.",
            "logical_axes": "Names of the dims of parameters that their model gives none, by path "
            'pattern: {"**/up/kernel": ["embed", "mlp"]}.',
            "gradient_reduction": 'When gradients are reduced over data ranks: once a "step" '
            '(stages 0 and 1), every "micro_batch", or "auto".',
            "data_reduction": 'Who adds up the gradients of the data ranks: "xla" its own '
            'collectives, "ring" rings whose steps and order of summation are written down, '
            '"parameter_server" devices that own the parameters.',
        },
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "ring_directions": '"both" sends half of each piece each way round, "one" all of it '
            "one way.",
            "ring_wire": "What travels round the ring in the place of the gradients' own numbers: "
            '"bf16", or "int8" in blocks with error feedback; "none" is the numbers themselves.',
            "ring_bucket_bytes": "Gradients are fused into buckets of about so many bytes, a ring "
            'each; a text as "32 MiB" works too.',
        },
        when=("parallel.data_reduction", ("ring",)),
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "servers": "So many devices own the parameters and the optimizer's state; the others "
            "are workers.",
            "max_staleness": "Every worker at its own pace, and no gradient is applied that is "
            "older than so many versions; null is in step.",
            "worker_pace": "The time that each worker's compute takes by the seeded clock, for "
            "study; 1 by default.",
        },
        when=("parallel.data_reduction", ("parameter_server",)),
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "on_stale": 'A push that would be too old is kept from happening ("wait": its worker '
            'waits before it pulls), or dropped and counted ("drop").',
            "staleness_decay": "A gradient of staleness t is multiplied by this to the power t.",
        },
        when=("parallel.data_reduction", ("parameter_server",)),
        unless=("parallel.max_staleness", (None,)),
    ),
    *rows(
        "parallel",
        "honoured",
        {
            "sequence_parallel_activations": "Between products that the tensor axis cuts, "
            "activations are cut along the sequence over it.",
            "tensor_overlap": 'How its collectives overlap with products: "ring" breaks them into '
            'steps, "ring_both_ways" in both directions, "none" does not; "auto" is what compiles '
            "best for the platform.",
            "infer_tensor_cuts": '"auto" infers from the traced program what to cut, where neither '
            'the model nor the config names it; "never" leaves it whole.',
        },
        unless=ONE_PART,
    ),
    Entry("data_parallel_size", "honoured", "The size of mesh.replica x mesh.data."),
    refused("sequence_parallel_size", "The seq axis is not built; remove it or write 1.", 1, None),
    Entry("tensor_parallel.autotp_size", "honoured", "The size of mesh.tensor; 0 says nothing."),
    Entry(
        "tensor_parallel.preset_model",
        "honoured",
        "Cuts the modules of a family by their usual names: gpt2, llama or vit.",
        when=("tensor_parallel.partition_config.use_default_specs", (True, None)),
        unless=ONE_PART,
    ),
    *rows(
        "tensor_parallel.partition_config",
        "honoured",
        {
            "layer_specs": "Which weights are cut how: a mapping from path patterns to column, "
            "row, vocabulary or replicated, or DeepSpeed's list. The first that covers a weight "
            "counts, before what the model says.",
            "use_default_specs": "The preset's specs follow layer_specs; false leaves them out.",
        },
        unless=ONE_PART,
    ),
    refused(
        "tensor_parallel.partition_config.strict_mode",
        "Not built: the placement table shows what is left whole; remove it.",
        False,
    ),
    *rows(
        "tensor_parallel.partition_config",
        "harmless",
        {
            "tp_size": "DeepSpeed overwrites it with tensor_parallel.autotp_size, which counts "
            "here too.",
            "embedding_partition_dim": "DeepSpeed does not read it; the word vocabulary in "
            "layer_specs cuts an embedding.",
            "lm_head_patterns": "Arrays are global: a head needs no layer of its own. The word "
            "vocabulary in layer_specs cuts it.",
        },
    ),
    Entry(
        "tensor_parallel.tp_overlap_comm",
        "approximated",
        'With parallel.sequence_parallel_activations as parallel.tensor_overlap "ring"; without '
        "it XLA overlaps what it can, with it or without.",
        unless=ONE_PART,
    ),
    refused_section("expert_parallel", "The expert axis is not built; remove it."),
    Entry("use_data_before_expert_parallelism", "harmless", "There is no expert axis above 1."),
    Entry(
        "parallel.remat",
        "honoured",
        "What each unit (the repeated module) keeps for its backward pass, which makes the rest "
        'again: "none" makes nothing again, "full" all but its input, "dots" keeps the products '
        'with weights, "attention" what attention gives, which spares its kernel\'s forward '
        'pass; {"every_n": k} keeps the input of every '
        'k-th unit, {"budget": bytes} what is dearest to make again within so many bytes a '
        'device, and {"save": [...], "offload": [...]} the activations of these names.',
    ),
    *rows(
        "activation_checkpointing",
        "honoured",
        {
            "cpu_checkpointing": "What is kept for the backward pass waits in host memory; without "
            'parallel.remat that is as "full" keeps it.',
            "number_checkpoints": "So many units keep their input: parallel.remat every_n, by "
            "their number.",
        },
    ),
    Entry(
        "activation_checkpointing.partition_activations",
        "honoured",
        "What is kept for the backward pass is cut over tensor, and gathered again there.",
        unless=ONE_PART,
    ),
    *alike(
        "activation_checkpointing",
        "harmless",
        "A knob of DeepSpeed's runtime; XLA plans the buffers.",
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    ),
)


# With one stage there is nothing to pass on.
ONE_STAGE = ("mesh.pipe", (1,))

PIPELINE: tuple[Entry, ...] = (
    *rows(
        "parallel",
        "honoured",
        {
            "pipeline_schedule": 'In which order micro-batches pass the stages: "1f1b", one '
            'forward and one backward in turn; "gpipe", all forwards first, which keeps the '
            'inputs of every micro-batch; "interleaved", 1f1b with several chunks of the model a '
            "device, for less waiting.",
            "pipeline_recompute": 'What the backward pass of a stage makes again: "stage" all but '
            'its input; "layers" besides one layer at a time, for less memory and one more '
            'forward; "save" nothing.',
        },
        unless=ONE_STAGE,
    ),
    Entry(
        "parallel.pipeline_chunks",
        "honoured",
        "How many chunks of the model each device holds.",
        when=("parallel.pipeline_schedule", ("interleaved",)),
        unless=ONE_STAGE,
    ),
    Entry(
        "parallel.pipeline_gather",
        "honoured",
        'When ZeRO 3 gathers a stage\'s weights: in each "tick" a layer at a time, or once a '
        '"step", whole.',
        when=("zero_optimization.stage", (3,)),
        unless=ONE_STAGE,
    ),
    Entry("pipeline.stages", "honoured", 'The size of mesh.pipe; "auto" says nothing.'),
    *rows(
        "pipeline",
        "approximated",
        {
            "partition": "The blocks of a stack are alike: equal numbers of layers, of parameters "
            "and of operations are the same cut. Embedding and head need no balancing, since all "
            "stages share them.",
            "activation_checkpoint_interval": 'As parallel.pipeline_recompute "layers": more than '
            "1 is taken as 1, since each layer is one checkpoint; 0 says nothing.",
            **dict.fromkeys(
                ("pipe_partitioned", "grad_partitioned"),
                "DeepSpeed sends what passes between stages cut over the model-parallel ranks, and "
                "gathers it on arrival. Here it is cut over tensor with "
                "parallel.sequence_parallel_activations; without, XLA chooses.",
            ),
        },
        unless=ONE_STAGE,
    ),
    Entry(
        "pipeline.seed_layers",
        "harmless",
        "Each layer has its own random stream here, whatever stage it is in.",
    ),
)
