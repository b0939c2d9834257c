"""Verdicts on batch size, gradient, precision, optimizer, schedule and elasticity keys."""

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
            "train_batch_size": "Samples per optimizer step, over all devices: micro-batch x "
            "accumulation x data-parallel size.",
            "train_micro_batch_size_per_gpu": "Samples per micro-batch and data rank.",
            "gradient_accumulation_steps": "Micro-batches per optimizer step, run by a scan inside "
            "the compiled step.",
            "gradient_clipping": "The gradient's global norm is clipped to this; 0 disables it. "
            "The norm before and after is a metric.",
            "gradient_allreduce_op": '"mean" averages over N data ranks, "sum" is N times that.',
            "steps_per_print": "Number of steps between log lines of loss and learning rate.",
            "wall_clock_breakdown": "Logs the time of each step, and waits for it.",
            "memory_breakdown": "Logs device memory after a step.",
            "dump_state": "Logs the config and the placement table at the start.",
        },
    ),
    Entry(
        "communication_data_type",
        "approximated",
        "Gradients are reduced in this dtype under stage 3 and where they are reduced once per "
        "step; otherwise in the dtype that the backward pass computes.",
    ),
    *rows(
        "",
        "harmless",
        {
            "prescale_gradients": "XLA chooses where to divide; the mean is the same.",
            "gradient_predivide_factor": "XLA chooses where to divide; the mean is the same.",
            "seq_parallel_communication_data_type": "Only for the seq axis, which is not built "
            "and refused above 1.",
            "disable_allgather": "XLA chooses the collectives.",
            "vocabulary_size": "Only for warnings in DeepSpeed; the model defines its vocabulary.",
            "dataloader_drop_last": "Only for DeepSpeed's data loader; engine.train_batch takes "
            "complete batches.",
        },
    ),
    Entry(
        "managed_gradient_accumulation",
        "refused",
        "The step accumulates inside one program; pass engine.train_batch a complete global batch.",
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
            "loss_scale_window": "The scale doubles after so many steps without overflow.",
            "hysteresis": "Number of overflows before the scale is halved.",
            "consecutive_hysteresis": "A step without overflow restores the hysteresis.",
            "min_loss_scale": "Lower bound of the scale.",
            "fp16_master_weights_and_grads": "Masters and gradients are in fp16 too.",
        },
        when=FP16,
    ),
    Entry(
        "fp16.auto_cast",
        "approximated",
        "Floating inputs are cast to the compute dtype in any case.",
        when=FP16,
    ),
    *rows("bf16", "honoured", {"enabled": "Computes in bf16 from fp32 masters."}),
    *rows(
        "bf16",
        "honoured",
        {
            "check_grad_overflow": "A step with a non-finite gradient is skipped and counted.",
            "bf16_master_weights_and_grads": "Masters and gradients are in bf16 too.",
            "bf16_optimizer_states": "The optimizer's moments are stored in bf16.",
        },
        when=BF16,
    ),
    Entry("bf16.immediate_grad_update", "harmless", "XLA orders the update."),
    Entry("data_types.grad_accum_dtype", "honoured", "The dtype in which gradients accumulate."),
    *[
        refused(
            f"data_types.{key}",
            "Parameters are stored as fp32 masters and buffers as the model initializes them; set "
            "bf16 or fp16 for the compute dtype.",
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
    Entry("torch_autocast.dtype", "approximated", "Used as the compute dtype.", when=AUTOCAST),
    refused(
        "torch_autocast.lower_precision_safe_modules",
        "Names modules of torch; list what must stay fp32 in parallel.full_precision.",
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
            "exclude_norms_and_biases": "Excludes norms and biases from the weight decay.",
            "ema_decay": "Maintains an exponential moving average of the weights.",
            "groups.pattern": "The parameters of this group, as a path pattern.",
            "groups.lr_factor": "Multiplies the learning rate of the group.",
            "groups.weight_decay": "The weight decay of the group.",
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
            "bias_correction": "Corrects the bias of moments that start at zero.",
            "adam_w_mode": "False couples the decay to the gradient, as plain Adam does.",
            "momentum": "The momentum's decay rate.",
            "dampening": "The share of the gradient that the momentum leaves out.",
            "nesterov": "Nesterov's momentum.",
            "lr_decay": "The rate falls with 1 / (1 + (step - 1) lr_decay).",
            "initial_accumulator_value": "Initial value of Adagrad's sum of squares.",
            "max_coeff": "The largest trust ratio.",
            "min_coeff": "The smallest trust ratio.",
            "muon_lr": "Learning rate of matrices; by default lr.",
            "adam_lr": "Learning rate of other parameters; by default lr.",
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
    Entry("scheduler.type", "honoured", "The schedule, by DeepSpeed's formula."),
    *rows(
        "scheduler.params",
        "honoured",
        {
            "warmup_min_lr": "Learning rate at the start of the warm-up.",
            "warmup_max_lr": "Learning rate at the end of the warm-up.",
            "warmup_num_steps": "Number of warm-up steps.",
            "warmup_type": 'The warm-up\'s curve: "log", DeepSpeed\'s default, or "linear".',
            "total_num_steps": "The step at which the decay ends.",
            "warmup_min_ratio": "Start of the warm-up, as a share of the optimizer's lr.",
            "cos_min_ratio": "End of the cosine, as a share of the optimizer's lr.",
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
            "lr_range_test_min_lr": "Learning rate at the start of the range test.",
            "lr_range_test_step_size": "Steps from one rate to the next.",
            "lr_range_test_step_rate": "How fast the rate grows.",
            "lr_range_test_staircase": "Grows in stairs.",
        },
    ),
    refused(
        "scheduler.params.last_batch_iteration",
        "The step counter is in the train state and its checkpoints.",
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
            "prefer_larger_batch": "Of two batches with equally many counts, use the larger.",
            "ignore_non_elastic_batch_info": "Allows batch sizes outside the section, and ignores "
            "them.",
        },
        when=ELASTIC,
    ),
    Entry("elasticity.min_time", "harmless", "A hint to DeepSpeed's cluster scheduler."),
    Entry(
        "elasticity.version",
        "approximated",
        "0.1 and 0.2 give the same table; 0.2's fallback for a device count outside of it is not "
        "built: such a count is an error that names the nearest ones.",
        when=ELASTIC,
    ),
    *[
        refused(
            f"elasticity.{key}",
            "The table lists data-parallel sizes; the mesh has the other axes.",
            1,
        )
        for key in ("model_parallel_size", "num_gpus_per_node")
    ],
)
