"""Sections `elasticity`, `checkpoint`, `model`, `run`, `data`, `autotuning`, and monitors."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import (
    Coercing,
    Count,
    Flag,
    Int,
    Lenient,
    Natural,
    NonNegative,
    Number,
    Opaque,
    Pattern,
    Positive,
    Section,
    Seed,
    Share,
    Text,
    lower,
    section,
)
from jaxspeed.config.verdicts import REMOVED, approximated, harmless, honoured, refused

_DATA_RANKS = "The table lists data-parallel sizes; the mesh has the other axes."
_MONITOR = (
    "Written each step, by jaxspeed train and under initialize; without an output_path into the "
    "run's folder, or the current one."
)
_OF_MODULES = (
    "Of modules the parameters are reported, at each depth; FLOPs and latency of the step alone."
)
_ALL_LOGGED = ("comms_logger.prof_all", (True,))
_NO_TRIALS = "Candidates are estimated, not run: there is no profile and no experiment file."
_FIXED_BATCH = (
    "The search never changes train_batch_size; a value outside of these bounds is refused."
)
_PROFILING = ("flops_profiler.enabled", (True,))
_TUNING = ("autotuning.enabled", (True,))
_ELASTIC = ("elasticity.enabled", (True,))
_LOGGING = ("comms_logger.enabled", (True,))


class Elasticity(Lenient):
    """Elastic batch: one global batch for many device counts."""

    enabled: Flag = honoured(
        False,
        "The batch triple comes from DeepSpeed's table of compatible device counts. "
        f"{REMOVED}; it works here.",
    )
    max_train_batch_size: Count = honoured(
        2000, "The global batch stays at or below this.", when=_ELASTIC
    )
    micro_batch_sizes: Annotated[list[Count], Field(min_length=1)] = honoured(
        [2, 4, 6], "The micro-batches to choose from.", when=_ELASTIC
    )
    min_gpus: Count = honoured(1, "The smallest data-parallel size in the table.", when=_ELASTIC)
    max_gpus: Count = honoured(
        10_000, "The largest data-parallel size in the table.", when=_ELASTIC
    )
    prefer_larger_batch: Flag = honoured(
        True, "Of two batches with equally many counts, use the larger.", when=_ELASTIC
    )
    ignore_non_elastic_batch_info: Flag = honoured(
        False, "Allows batch sizes outside the section, and ignores them.", when=_ELASTIC
    )
    min_time: Natural = harmless(0, "A hint to DeepSpeed's cluster scheduler.")
    version: Number = honoured(
        0.2,
        "0.2 has a batch for each device count: outside of the table, the largest for this count. "
        "0.1 has only the table, and another count is an error that names the nearest ones.",
        when=_ELASTIC,
    )
    model_parallel_size: Count = refused(1, _DATA_RANKS)
    num_gpus_per_node: Count = refused(1, _DATA_RANKS)


def _capital(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


class Checkpoint(Lenient):
    """Options of checkpoints."""

    exclude_frozen_parameters: Flag | None = honoured(
        None,
        "Whether checkpoints leave out the parameters that are not trained, which are read again "
        "from the folder of a pretrained model; by default true with lora and such a model.",
    )
    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capital)] = (
        harmless("Warn", "One program runs on all processes, so they agree on the tag.")
    )
    load_universal: Flag = harmless(False, "Always on: a checkpoint can be restored onto any mesh.")
    use_node_local_storage: Flag = approximated(
        False,
        "A checkpoint is one folder, which all processes share: put it on shared storage.",
        False,
    )
    parallel_write: Opaque | None = harmless(None, "Always on: each process writes its own shards.")


def _import_path(value: str) -> str:
    module, _, name = value.partition(":")
    if module.endswith(".py"):
        needs = f'a module, not a file: "{module[:-3].replace("/", ".")}:{name}"'
        raise PydanticCustomError("import_path", "{needs}", {"needs": needs})
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        needs = 'an import path of the form "package.module:name"'
        raise PydanticCustomError("import_path", "{needs}", {"needs": needs})
    return value


class Quantize(Section):
    """Frozen weights of linear layers, stored and gathered in 4 or 8 bits (QLoRA)."""

    weights: Literal["nf4", "fp4", "int8"] = honoured(
        "nf4", "Values as in bitsandbytes: of 4 bits in blocks, or of 8 bits in rows."
    )
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = honoured(
        64, "Values of nf4 or fp4 that share a scale: neighbours along the input dim."
    )
    double: Flag = honoured(
        True, "Whether the scales of nf4 or fp4 are quantized too, to 8 bits in groups of 256."
    )
    modules: Annotated[list[Pattern], Field(min_length=1)] | None = honoured(
        None,
        "The modules or weights, as path patterns; by default all linear layers but the head.",
    )


class FrozenModelSection(Section):
    """A second model, which is not trained: a reference, a teacher. A text is its folder."""

    pretrained: Text = Field(description="A Hugging Face folder, or a model's id on the hub.")
    quantize: Quantize | None = Field(None, description="How its linear layers are stored.")
    zero_stage: Literal[0, 3] | None = Field(
        None, description="3 shards it over the data ranks; by default where there are several."
    )
    offload: Flag = Field(False, description="Whether it is in host memory between its layers.")

    @model_validator(mode="before")
    @classmethod
    def _of_folder(cls, value: Any) -> Any:
        return {"pretrained": value} if isinstance(value, str) else value


class ModelSection(Section):
    """Model to build: a family's name, or the import path of a factory."""

    family: Text | None = honoured(
        None, "The registered family to build, such as gpt2, llama, vit or mlp."
    )
    pretrained: Text | None = honoured(
        None,
        "A Hugging Face folder (or a model's id on the hub): its sizes and weights; model.config "
        "overrides what is no size.",
    )
    factory: Annotated[Text, AfterValidator(_import_path)] | None = honoured(
        None, "The import path of a factory, package.module:name."
    )
    loss: Annotated[Text, AfterValidator(_import_path)] | None = honoured(
        None, "The import path of a factory's loss, loss_fn(model, batch): package.module:name."
    )
    preset: Text | None = honoured(None, "The family's sizes by name; model.config overrides them.")
    config: Opaque = honoured({}, "The family's or factory's own arguments.")
    text_only: Flag = honoured(
        False, "Of a pretrained model with images read the language model alone."
    )
    quantize: Quantize | None = None

    @property
    def named(self) -> list[str]:
        """The keys that name a model, of which one is set; none for a model that is passed."""
        keys = ("family", "factory", "pretrained")
        return [key for key in keys if getattr(self, key) is not None]


class ObjectiveSection(Section):
    """What the model is trained for; the other keys are those of the objective's `Options`."""

    model_config = ConfigDict(extra="allow")

    type: Text = honoured(
        ...,
        "next_token, masked, classification or span_corruption, of which each family has one; dpo, "
        "cpo, orpo, kto, reward, grpo, rloo or distill; or the import path of an objective of your "
        "own, package.module:Name. Its other keys are beside it.",
    )

    @property
    def own_keys(self) -> dict[str, Any]:
        """The keys beside `type`."""
        return dict(self.model_extra or {})


def _flag_or_folder(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    needs = "true, false or the path of a folder"
    raise PydanticCustomError("flag_or_folder", "{needs}", {"needs": needs})


def _devices(value: str) -> str:
    platform, colon, count = value.partition(":")
    if platform not in ("cpu", "gpu", "cuda", "tpu") or (
        colon and (platform != "cpu" or not count.isdecimal() or int(count) < 1)
    ):
        needs = "cpu, gpu or tpu, or simulated devices such as cpu:8"
        raise PydanticCustomError("devices", "{needs}", {"needs": needs})
    return value


Devices = Annotated[Text, AfterValidator(_devices)]
CacheFolder = Annotated[bool | str, BeforeValidator(_flag_or_folder)]


_LEARNT = "by default ten times the longest so far, and at least {floor}."


class WatchdogSection(Section):
    """Time-outs after which all processes of a run end, with the name of the one that is stuck."""

    enabled: Flag | None = honoured(
        None,
        "Whether stuck sections and silent processes end the run; by default with several "
        "processes.",
    )
    silence: Positive = honoured(
        60.0, "Seconds without a heartbeat after which a process counts as dead."
    )
    start: Positive | None = honoured(
        None, "Seconds to start; by default 1800, also between the first and the last host."
    )
    compile: Positive | None = honoured(None, f"Seconds to compile; {_LEARNT.format(floor='3600')}")
    step: Positive | None = honoured(
        None, f"Seconds without progress in training; {_LEARNT.format(floor='600')}"
    )
    evaluate: Positive | None = honoured(
        None, f"Seconds for a batch of an evaluation; {_LEARNT.format(floor='600')}"
    )
    generate: Positive | None = honoured(
        None, f"Seconds for a segment of `engine.generate`; {_LEARNT.format(floor='600')}"
    )
    rollout: Positive | None = honoured(
        None, f"Seconds for a segment of `engine.rollout`; {_LEARNT.format(floor='600')}"
    )
    rewards: Positive | None = honoured(
        None, f"Seconds without a reward that arrives; {_LEARNT.format(floor='600')}"
    )
    save: Positive | None = honoured(
        None, f"Seconds to start a save, or to end one; {_LEARNT.format(floor='1800')}"
    )
    restore: Positive | None = honoured(None, f"Seconds to restore; {_LEARNT.format(floor='3600')}")
    user_code: Positive | None = honoured(
        None,
        "Seconds of a script's own code between two calls of its engine; by default without limit, "
        "with a warning when other processes wait for it beyond their time-outs.",
    )


class ImportFrom(Section):
    """A checkpoint of DeepSpeed or torch that a run continues."""

    folder: Text = honoured(
        ...,
        "Its folder: of DeepSpeed (or what `latest` names), or of torch.distributed.checkpoint.",
    )
    map: Text | None = honoured(
        None,
        "A Python file that defines `table`, a MappingTable, or a function of the model's sizes; "
        "by default that of the model's family.",
    )


class RunSection(Section):
    """One training run."""

    devices: Devices | None = honoured(
        None,
        "Platform: cpu, gpu or tpu, or simulated devices such as cpu:8; by default what JAX finds.",
    )
    steps: Count | None = honoured(None, "Total optimizer steps, also of a resumed run.")
    epochs: Positive | None = honoured(
        None,
        "Passes over the training samples (of a mixture, until its first source is exhausted), "
        "instead of steps, which follow once the data are read.",
    )
    seed: Seed = honoured(0, "Seed of the initial weights and of every random stream.")
    output: Text | None = honoured(
        None, "The folder of the run: its config, metrics, checkpoints and loss curve."
    )
    checkpoints: Text | None = honoured(
        None,
        "Location of checkpoints, a folder or a gs:// or s3:// URL; by default in the run's "
        "folder.",
    )
    init_from: Text | None = honoured(
        None,
        "The folder of a run, or the URL of checkpoints; weights are initialized from the newest, "
        "optimizer and step start anew.",
    )
    import_from: ImportFrom | None = None
    compilation_cache: CacheFolder = honoured(
        True,
        "Persistent cache of compiled programs: true in the user's cache folder, a path in the "
        "folder of this path, false none.",
    )
    executable: Text | None = honoured(
        None,
        "A file of `jaxspeed plan --compile --keep`, from which the step starts without "
        "compilation. Loading it executes its code: only from a trusted source.",
    )
    trust_executable: Flag = honoured(
        False, "Whether `executable` may be a file that other users own or can write."
    )
    eval_every: Count | None = honoured(
        None, "Steps between evaluations on held-out samples; always one at the end."
    )
    eval_batches: Count | None = honoured(None, "Batches per evaluation; by default all.")
    eval_tasks: list[Text] = honoured(
        [],
        "Tasks of lm-eval, by name or as YAML files, whose scores each evaluation computes too.",
    )
    checkpoint_every: Count | None = honoured(
        None,
        "Steps between checkpoints; a tenth of the run by default, at most 1000. There is always "
        "one at the end.",
    )
    keep: Count = honoured(3, "Number of newest checkpoints retained.")
    keep_every: Count | None = honoured(
        None, "Checkpoints at multiples of this many steps are retained forever."
    )
    max_skipped: Count = honoured(
        30, "Consecutive skipped steps after which the run stops with a diagnosis."
    )
    watchdog: WatchdogSection = section()
    profile_step: Count | None = honoured(None, "First step of a trace for xprof.")
    profile_steps: Count = honoured(3, "Number of steps in the trace.")
    sample_tokens: Natural = honoured(
        200, "Length of the sample that a language model generates at the end."
    )
    sample_prompt: Text = honoured("def ", "Prompt of the sample.")
    sample_temperature: NonNegative = honoured(0.8, "Temperature of the sample; 0 is greedy.")


# -- sections that report on a run: monitors, profilers, the communication log --------------------


class FileMonitor(Coercing):
    """TensorBoard or CSV files under `output_path`/`job_name`."""

    enabled: Flag = honoured(False, _MONITOR)
    output_path: Annotated[str, Strict()] = honoured("", _MONITOR)
    job_name: Text = honoured("DeepSpeedJobName", _MONITOR)


class Wandb(Coercing):
    """Weights & Biases."""

    enabled: Flag = honoured(False, _MONITOR)
    group: Text | None = honoured(None, _MONITOR)
    team: Text | None = honoured(None, _MONITOR)
    project: Text = honoured("deepspeed", _MONITOR)


class FlopsProfiler(Lenient):
    """FLOPs of a step."""

    enabled: Flag = honoured(
        False,
        "Reports FLOPs, parameters, latency and throughput of one step, of the compiled step.",
    )
    recompute_fwd_factor: NonNegative = harmless(
        0.0, "The compiled program has what is recomputed.", when=_PROFILING
    )
    profile_step: Natural = honoured(1, "The step that is reported.", when=_PROFILING)
    module_depth: Int = approximated(-1, _OF_MODULES, when=_PROFILING)
    top_modules: Natural = approximated(1, _OF_MODULES, when=_PROFILING)
    detailed: Flag = approximated(True, _OF_MODULES, when=_PROFILING)
    output_file: Text | None = honoured(
        None, "The file of the report, instead of the log.", when=_PROFILING
    )


class CommsLogger(Coercing):
    """Collectives of a step."""

    enabled: Flag = honoured(
        False,
        "Logs the collectives of the compiled step, by kind and size with their number, at the "
        "first step. They overlap, so that none has a latency of its own.",
    )
    verbose: Flag = honoured(False, "Logs each collective too.", when=_LOGGING)
    prof_all: Flag = honoured(True, "Whether all are logged, or those of prof_ops.", when=_LOGGING)
    debug: Flag = honoured(
        False, "With verbose, logs where each comes from in the model.", when=_LOGGING
    )
    prof_ops: list[Text] = honoured(
        [], "The operations to log, such as all_gather.", when=_LOGGING, unless=_ALL_LOGGED
    )


# -- the `autotuning` section: bounds of `jaxspeed plan --search` ---------------------------------

Metric = Annotated[Literal["throughput", "latency", "flops"], BeforeValidator(lower)]
Tuner = Annotated[Literal["gridsearch", "random", "model_based"], BeforeValidator(lower)]


class Autotuning(Lenient):
    """DeepSpeed's bounds of a search, and its options of trial runs."""

    enabled: Flag = honoured(
        False, "jaxspeed plan --search searches within this section; training ignores it."
    )
    fast: Flag = honoured(
        True, "If set to true, only the stage and the micro-batch size are changed.", when=_TUNING
    )
    metric: Metric = harmless(
        "throughput",
        "train_batch_size is fixed, so throughput, latency and flops rank candidates equally.",
        when=_TUNING,
    )
    metric_path: Text | None = harmless(None, _NO_TRIALS, when=_TUNING)
    mp_size: Count = honoured(1, "The tensor axis of every candidate, if set.", when=_TUNING)
    min_train_batch_size: Count = approximated(1, _FIXED_BATCH, when=_TUNING)
    max_train_batch_size: Count | None = approximated(None, _FIXED_BATCH, when=_TUNING)
    min_train_micro_batch_size_per_gpu: Count = honoured(
        1, "The smallest micro-batch size that is tried.", when=_TUNING
    )
    max_train_micro_batch_size_per_gpu: Count = honoured(
        1024, "The largest micro-batch size that is tried.", when=_TUNING
    )
    num_tuning_micro_batch_sizes: Count = harmless(
        3, "Every size within the bounds is ranked by formula, which is cheap.", when=_TUNING
    )
    tuner_type: Tuner = harmless(
        "gridsearch",
        "Candidates are not run: all are ranked by formula, the best ones estimated from their "
        "traced step.",
        when=_TUNING,
    )
    tuner_early_stopping: Natural = harmless(
        5, "The search ends when no change improves the best candidate.", when=_TUNING
    )
    tuner_num_trials: Count = honoured(
        50,
        "The most candidates that are estimated from their traced step; if not set, only time "
        "bounds them.",
        when=_TUNING,
    )
    results_dir: Text = harmless("autotuning_results", _NO_TRIALS, when=_TUNING)
    exps_dir: Text = harmless("autotuning_exps", _NO_TRIALS, when=_TUNING)
    overwrite: Flag = harmless(True, _NO_TRIALS, when=_TUNING)
    start_profile_step: Natural = harmless(3, _NO_TRIALS, when=_TUNING)
    end_profile_step: Natural = harmless(5, _NO_TRIALS, when=_TUNING)
    arg_mappings: Opaque | None = harmless(None, _NO_TRIALS, when=_TUNING)
    model_info: Opaque | None = harmless(None, _NO_TRIALS, when=_TUNING)
    model_info_path: Text | None = harmless(None, _NO_TRIALS, when=_TUNING)

    def has(self, key: str) -> bool:
        """Whether the section is enabled and sets the key: its defaults are no bounds."""
        return self.enabled and key in self.model_fields_set


# -- sources of samples ----------------------------------------------------------------------------


IdDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
ChatFormat = Literal["messages", "prompt_completion", "conversations", "alpaca", "caption"]


class SourceSection(Section):
    """One source of samples."""

    source: Text | None = honoured(
        None,
        "stdlib (the default), text, jsonl, json, parquet, arrow, huggingface, tokens, images, "
        "synthetic, or the import path of an array or iterable, package.module:name.",
    )
    format: ChatFormat | None = honoured(
        None,
        "Conversations in records: messages, prompt_completion, conversations (ShareGPT) or alpaca "
        "(instruction, input, output); by default what the fields of each file's first record are.",
    )
    path: Text | None = honoured(
        None, "A file, a folder or a glob; the name of a data set on Hugging Face."
    )
    paths: list[Text] | None = honoured(None, "A list of such paths.")
    dtype: IdDtype | None = honoured(
        None, "The dtype of a raw file of tokens; by default that in a meta.json beside it."
    )
    text_field: Text = honoured("text", "The field of a record with its text.")
    split: Text = honoured("train", "The split of a data set on Hugging Face.")
    samples: Count | None = honoured(
        None, "Number of samples of a synthetic source, or taken from an iterable."
    )


class MixtureSource(SourceSection):
    """One source of a mixture."""

    weight: Positive = honoured(
        1.0, "Weight of this source in the mixture, relative to the others."
    )


class Data(SourceSection):
    """Data sources, tokenizer and order of samples."""

    mixture: list[MixtureSource] = Field(default_factory=list)
    eval: SourceSection | None = None  # evaluated in place of a held-out share
    tokenizer: Text = honoured(
        "bytes",
        "bytes, bpe (trained on the corpus and saved with the run), or the path of a "
        "tokenizer.json or tokenizer.model.",
    )
    vocab_size: Count | None = honoured(None, "Vocabulary size of bpe; the model's by default.")
    seq_len: Count | None = honoured(None, "Tokens per sample; the model's positions by default.")
    document_masks: Flag = honoured(
        True, "No attention and no prediction across documents in one sample."
    )
    chat_template: Text | None = honoured(
        None,
        "Of conversations: a template's name (chatml, llama3, qwen, gemma, mistral, alpaca, or one "
        "of the tokenizer's), the path of a Jinja file, or a template; the tokenizer's by default.",
    )
    chat_template_kwargs: Opaque = honoured({}, "Variables for the chat template.")
    train_on: Literal["assistant", "last_turn", "everything"] = honoured(
        "assistant",
        "What the loss of a conversation counts: all turns of the assistant (a completion is one), "
        "the last of them, or every token.",
    )
    truncate: Literal["end", "start", "drop"] = honoured(
        "end",
        "What of a conversation longer than seq_len is truncated; drop leaves all of it out.",
    )
    untrained: Literal["error", "drop"] = honoured(
        "error", "Whether a conversation of which no token is trained is an error or dropped."
    )
    packing: Flag = honoured(
        True, "Several complete conversations in one sample; false: each is padded to seq_len."
    )
    held_out: Share = honoured(
        0.05, "The share of the samples held out for evaluation; none where data.eval is set."
    )
    shuffle: Flag = honoured(True, "A new order each epoch, a function of seed and step only.")
    seed: Natural | None = honoured(None, "Seed of the order; run.seed by default.")
    patches: Count | None = honoured(
        None,
        "Patches of the images of a sample at most; by default those of the sample with most.",
    )
    prefetch: Count = honoured(2, "Number of batches transferred to the devices ahead of the step.")

    @property
    def sources(self) -> Sequence[SourceSection]:
        """The sources of a mixture, or the one of the section itself."""
        return self.mixture or [self]
