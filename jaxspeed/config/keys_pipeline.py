"""Verdicts on what cuts a model into stages, and on how micro-batches pass them."""

from jaxspeed.config.verdicts import Entry, rows

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
