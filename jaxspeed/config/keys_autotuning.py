"""Verdicts on the section that bounds `jaxspeed plan --search`."""

from jaxspeed.config.verdicts import Entry, alike, rows

_ON = ("autotuning.enabled", (True,))

AUTOTUNING: tuple[Entry, ...] = (
    Entry(
        "autotuning.enabled",
        "honoured",
        "jaxspeed plan --search keeps to this section; training takes the config as it is.",
    ),
    *rows(
        "autotuning",
        "honoured",
        {
            "fast": "true, where it is said: only the stage and the micro-batch are changed.",
            "mp_size": "The tensor axis of every candidate, where it is said.",
            "min_train_micro_batch_size_per_gpu": "The smallest micro-batch that is tried.",
            "max_train_micro_batch_size_per_gpu": "The largest micro-batch that is tried.",
            "tuner_num_trials": "The most candidates that are estimated from their traced step; "
            "where it is not said, time alone bounds them.",
        },
        when=_ON,
    ),
    *alike(
        "autotuning",
        "approximated",
        "The batch of a step is kept as the config has it; one outside of these bounds is refused.",
        "min_train_batch_size max_train_batch_size",
        when=_ON,
    ),
    *rows(
        "autotuning",
        "harmless",
        {
            "metric": "The batch of a step is kept, so throughput, latency and flops put "
            "candidates into one order.",
            "num_tuning_micro_batch_sizes": "Every size within the bounds is looked at by formula, "
            "which costs nothing.",
            "tuner_type": "Candidates are not run: all are ordered by formula, the promising ones "
            "estimated from their traced step.",
            "tuner_early_stopping": "The search ends where no change makes its best better.",
        },
        when=_ON,
    ),
    *alike(
        "autotuning",
        "harmless",
        "Candidates are estimated, not run: there is nothing to profile, and no experiment's file.",
        "metric_path results_dir exps_dir overwrite start_profile_step end_profile_step "
        "arg_mappings model_info model_info_path",
        when=_ON,
    ),
)
