"""Verdicts on batch, gradients, precision, optimizer and schedule."""

from jaxspeed.config.verdicts import Entry, alike, refused, refused_section, rows

FP16 = ("fp16.enabled", (True,))
BF16 = ("bf16.enabled", (True,))
AUTOCAST = ("torch_autocast.enabled", (True,))
ELASTIC = ("elasticity.enabled", (True,))

TRAINING: tuple[Entry, ...] = (
    *rows(
        "",
        "honoured",
        {
            "train_batch_size": "Samples in one optimizer step, over all devices: micro batch x "
            "accumulation x data-parallel size.",
            "train_micro_batch_size_per_gpu": "Samples that one data rank takes at a time.",
            "gradient_accumulation_steps": "Micro-batches in one optimizer step, run by a scan "
            "inside the compiled step.",
            "gradient_clipping": "The gradient's global norm is cut to this; 0 switches it off. "
            "The norm before and after is a metric.",
            "gradient_allreduce_op": '"mean" averages over data ranks, "sum" is N times that.',
            "steps_per_print": "The loss and the rate are logged every so many steps.",
            "wall_clock_breakdown": "Each step is waited for and its time logged.",
            "memory_breakdown": "Device memory is logged after a step.",
            "dump_state": "The config and the placement table are logged at the start.",
        },
    ),
    Entry(
        "communication_data_type",
        "approximated",
        "Gradients are reduced in this format under stage 3 and where they are reduced once a "
        "step; elsewhere in the format in which the backward pass makes them.",
    ),
    *rows(
        "",
        "harmless",
        {
            "prescale_gradients": "XLA chooses where to divide; the mean is the same.",
            "gradient_predivide_factor": "XLA chooses where to divide; the mean is the same.",
            "seq_parallel_communication_data_type": "Speaks of the seq axis, which is refused "
            "above 1 until it is built.",
            "disable_allgather": "Collectives are XLA's choice.",
            "vocabulary_size": "DeepSpeed only warns with it; the model knows its vocabulary.",
            "dataloader_drop_last": "Speaks of DeepSpeed's own data loader; here you hand whole "
            "batches to engine.train_batch.",
        },
    ),
    Entry(
        "managed_gradient_accumulation",
        "refused",
        "The step accumulates inside one program; hand engine.train_batch a whole global batch.",
        off=(True,),
    ),
    refused(
        "sparse_gradients",
        "Gradients are dense arrays in XLA; remove the key, embeddings train without it.",
        False,
    ),
    # Precision.
    *rows(
        "fp16",
        "honoured",
        {"enabled": "Computes in fp16 from fp32 masters, with loss scaling."},
    ),
    *rows(
        "fp16",
        "honoured",
        {
            "loss_scale": "0 is the dynamic scale, any other number a fixed one.",
            "initial_scale_power": "The dynamic scale starts at 2 to this power.",
            "loss_scale_window": "The scale doubles after so many clean steps.",
            "hysteresis": "So many overflows pass before the scale is halved.",
            "consecutive_hysteresis": "A clean step restores the hysteresis.",
            "min_loss_scale": "The scale is never halved below this.",
            "fp16_master_weights_and_grads": "Masters and gradients are kept in fp16 too.",
        },
        when=FP16,
    ),
    Entry(
        "fp16.auto_cast",
        "approximated",
        "Floating inputs are cast to the compute format, with it or without.",
        when=FP16,
    ),
    *rows("bf16", "honoured", {"enabled": "Computes in bf16 from fp32 masters."}),
    *rows(
        "bf16",
        "honoured",
        {
            "check_grad_overflow": "A step with a non-finite gradient is skipped and counted.",
            "bf16_master_weights_and_grads": "Masters and gradients are kept in bf16 too.",
            "bf16_optimizer_states": "The optimizer's moments are kept in bf16.",
        },
        when=BF16,
    ),
    Entry("bf16.immediate_grad_update", "harmless", "XLA orders the update."),
    Entry("data_types.grad_accum_dtype", "honoured", "The format in which gradients accumulate."),
    *[
        refused(
            f"data_types.{key}",
            "Parameters are stored as fp32 masters and buffers as the model made them; set bf16 or "
            "fp16 for the compute format.",
            None,
        )
        for key in ("param_dtype", "buffer_dtype")
    ],
    *rows(
        "torch_autocast",
        "approximated",
        {
            "enabled": "Parameters and inputs are cast to torch_autocast.dtype, not operation by "
            "operation; parallel.full_precision names what stays fp32."
        },
    ),
    Entry("torch_autocast.dtype", "approximated", "Taken as the compute format.", when=AUTOCAST),
    refused(
        "torch_autocast.lower_precision_safe_modules",
        "Names modules of torch; name what must stay fp32 by parallel.full_precision.",
        None,
        [],
    ),
    refused_section("amp", 'Apex is for torch; write "bf16": {"enabled": true} or fp16.'),
    # Optimizer.
    *rows(
        "optimizer",
        "honoured",
        {
            "type": "The optimizer, built with Optax; Adam decouples its weight decay unless "
            "adam_w_mode is false.",
            "exclude_norms_and_biases": "Norms and biases are left out of the weight decay.",
            "ema_decay": "Keeps an exponential moving average of the weights.",
            "groups.pattern": "The parameters of this group, as a path pattern.",
            "groups.lr_factor": "Multiplies the learning rate of the group.",
            "groups.weight_decay": "The group's own weight decay.",
            "groups.frozen": "The group is not trained.",
        },
    ),
    Entry("optimizer.legacy_fusion", "harmless", "XLA fuses the update."),
    *rows(
        "optimizer.params",
        "honoured",
        {
            "lr": "The learning rate.",
            "betas": "Decay rates of the moments.",
            "eps": "Added to the denominator.",
            "eps_inside_sqrt": "Adds eps under the square root.",
            "weight_decay": "Weight decay.",
            "bias_correction": "Corrects the moments' start at zero.",
            "adam_w_mode": "False couples the decay to the gradient, as plain Adam does.",
            "momentum": "The momentum's decay rate.",
            "dampening": "The share of the gradient that the momentum leaves out.",
            "nesterov": "Nesterov's momentum.",
            "lr_decay": "The rate falls with 1 / (1 + (step - 1) lr_decay).",
            "initial_accumulator_value": "Where Adagrad's sum of squares starts.",
            "max_coeff": "The largest trust ratio.",
            "min_coeff": "The smallest trust ratio.",
            "muon_lr": "The rate of matrices; by default lr.",
            "adam_lr": "The rate of what is not a matrix; by default lr.",
            "ns_method": "The form of the Newton-Schulz iteration.",
        },
    ),
    *alike(
        "optimizer.params",
        "harmless",
        "A switch of torch's kernels; XLA fuses the update.",
        "fused foreach capturable differentiable torch_adam set_grad_none fp32_optimizer_states",
    ),
    refused("optimizer.params.amsgrad", "DeepSpeed's fused optimizers have no AMSGrad.", False),
    refused("optimizer.params.maximize", "Return the negative loss from loss_fn.", False),
    refused("optimizer.params.max_grad_norm", "Write gradient_clipping at the top level.", 0.0),
    # Schedule.
    Entry("scheduler.type", "honoured", "The schedule, step by step DeepSpeed's formula."),
    *rows(
        "scheduler.params",
        "honoured",
        {
            "warmup_min_lr": "Where the warm-up starts.",
            "warmup_max_lr": "Where the warm-up ends.",
            "warmup_num_steps": "How many steps the warm-up takes.",
            "warmup_type": 'The warm-up\'s curve: "log", DeepSpeed\'s default, or "linear".',
            "total_num_steps": "The step at which the decay ends.",
            "warmup_min_ratio": "Where the warm-up starts, as a share of the optimizer's lr.",
            "cos_min_ratio": "Where the cosine ends, as a share of the optimizer's lr.",
            "cycle_min_lr": "The rate at the cycle's ends.",
            "cycle_max_lr": "The rate at the cycle's peak.",
            "decay_lr_rate": "How fast the rate decays after the cycle.",
            "cycle_first_step_size": "Steps up.",
            "cycle_second_step_size": "Steps down; by default as many as up.",
            "cycle_first_stair_count": "Stairs on the way up; 0 for none.",
            "cycle_second_stair_count": "Stairs on the way down; by default as many as up.",
            "decay_step_size": "Steps between two decays after the cycle; 0 for none.",
            "cycle_momentum": "Cycles the first beta against the rate.",
            "cycle_min_mom": "The first beta at the rate's peak.",
            "cycle_max_mom": "The first beta at the cycle's ends.",
            "decay_mom_rate": "How fast the first beta grows after the cycle.",
            "lr_range_test_min_lr": "Where the range test starts.",
            "lr_range_test_step_size": "Steps from one rate to the next.",
            "lr_range_test_step_rate": "How fast the rate grows.",
            "lr_range_test_staircase": "Grows in stairs.",
        },
    ),
    refused(
        "scheduler.params.last_batch_iteration",
        "The step counter lives in the train state and in its checkpoints.",
        -1,
    ),
    # Elasticity.
    *rows(
        "elasticity",
        "honoured",
        {"enabled": "The batch triple comes from DeepSpeed's table of compatible device counts."},
    ),
    *rows(
        "elasticity",
        "honoured",
        {
            "max_train_batch_size": "The global batch stays at or below this.",
            "micro_batch_sizes": "The micro-batches to choose from.",
            "min_gpus": "The smallest data-parallel size in the table.",
            "max_gpus": "The largest data-parallel size in the table.",
            "prefer_larger_batch": "Of two batches with equally many counts the larger is taken.",
            "ignore_non_elastic_batch_info": "Allows batch sizes outside the section; they do not "
            "count.",
        },
        when=ELASTIC,
    ),
    Entry("elasticity.min_time", "harmless", "A hint to DeepSpeed's cluster scheduler."),
    Entry(
        "elasticity.version",
        "approximated",
        "0.1 and 0.2 give the same table; 0.2's fall-back for a device count outside of it is not "
        "taken: such a count is an error that names the nearest ones.",
        when=ELASTIC,
    ),
    *[
        refused(
            f"elasticity.{key}",
            "The table speaks of data-parallel sizes; the mesh has the other axes.",
            1,
        )
        for key in ("model_parallel_size", "num_gpus_per_node")
    ],
)
