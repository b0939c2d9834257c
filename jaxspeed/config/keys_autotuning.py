"""Verdicts on the `autotuning` section, which bounds `jaxspeed plan --search`."""

from jaxspeed.config.verdicts import Entry, alike, rows

_ON = ("autotuning.enabled", (True,))

AUTOTUNING: tuple[Entry, ...] = (
    Entry(
        "autotuning.enabled",
        "honoured",
        "jaxspeed plan --search searches within this section; training ignores it.",
    ),
    *rows(
        "autotuning",
        "honoured",
        {
            "fast": "If set to true, only the stage and the micro-batch size are changed.",
            "mp_size": "The tensor axis of every candidate, if set.",
            "min_train_micro_batch_size_per_gpu": "The smallest micro-batch size that is tried.",
            "max_train_micro_batch_size_per_gpu": "The largest micro-batch size that is tried.",
            "tuner_num_trials": "The most candidates that are estimated from their traced step; "
            "if not set, only time bounds them.",
        },
        when=_ON,
    ),
    *alike(
        "autotuning",
        "approximated",
        "The search never changes train_batch_size; a value outside of these bounds is refused.",
        "min_train_batch_size max_train_batch_size",
        when=_ON,
    ),
    *rows(
        "autotuning",
        "harmless",
        {
            "metric": "train_batch_size is fixed, so throughput, latency and flops rank candidates "
            "equally.",
            "num_tuning_micro_batch_sizes": "Every size within the bounds is ranked by formula, "
            "which is cheap.",
            "tuner_type": "Candidates are not run: all are ranked by formula, the best ones "
            "estimated from their traced step.",
            "tuner_early_stopping": "The search ends when no change improves the best candidate.",
        },
        when=_ON,
    ),
    *alike(
        "autotuning",
        "harmless",
        "Candidates are estimated, not run: there is no profile and no experiment file.",
        "metric_path results_dir exps_dir overwrite start_profile_step end_profile_step "
        "arg_mappings model_info model_info_path",
        when=_ON,
    ),
)
