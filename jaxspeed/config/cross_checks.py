"""Cross-field validation: contradictions between config keys that are valid by themselves."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxspeed.axes import axis_names, product
from jaxspeed.config.batch import ACCUMULATION, MICRO, TRAIN, batch_keys, batch_problem
from jaxspeed.config.data_reduction import data_reduction_problems
from jaxspeed.config.elastic import elastic_table
from jaxspeed.config.equivalent_keys import offload_problems, pipeline_problems, stages_of
from jaxspeed.config.lr_schedules import SCHEDULERS
from jaxspeed.config.objective_keys import objective_problems
from jaxspeed.config.optimizers import LEAST_SIZE, OPTIMIZERS
from jaxspeed.config.problems import Problem, unknown_name
from jaxspeed.config.remat import recompute_of
from jaxspeed.config.run_sections import SourceSection
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown


def check(settings: Settings) -> Iterator[Problem]:
    """Yield the problems of all invalid combinations."""
    yield from _precision(settings)
    yield from _batch(settings)
    yield from _elasticity(settings)
    yield from _autotuning(settings)
    yield from _optimizer(settings)
    yield from _schedule(settings)
    yield from _gradients(settings)
    yield from data_reduction_problems(settings)
    yield from _tensor(settings)
    yield from pipeline_problems(settings)
    yield from _recompute(settings)
    yield from offload_problems(settings)
    yield from _model(settings)
    yield from objective_problems(settings)
    yield from _lora(settings)
    yield from _data(settings)
    yield from _run(settings)


def _precision(settings: Settings) -> Iterator[Problem]:
    fp16, bf16, autocast = settings.fp16, settings.bf16, settings.torch_autocast
    if fp16.enabled and bf16.enabled:
        actual = "true, while bf16.enabled is true"
        yield Problem("fp16.enabled", actual, "Disable one of the two.", ("bf16.enabled",))
    if autocast.enabled and autocast.dtype is None and not bf16.enabled:
        works = 'Needs "bfloat16" or "float16": torch\'s own default depends on the device.'
        yield Problem("torch_autocast.dtype", "nothing", works)
    for name, section in (("fp16", fp16), ("bf16", bf16)):
        alike = name == "bf16" and autocast.dtype in (None, "bf16")
        if autocast.enabled and section.enabled and not alike:
            actual = f"true, while {name}.enabled is true"
            works = (
                f"{name} casts parameters and inputs, torch_autocast the operands of matmuls and "
                "convolutions: disable one of the two."
            )
            yield Problem("torch_autocast.enabled", actual, works, (f"{name}.enabled",))
    for key in ("min_loss_scale", "loss_scale_window"):
        if fp16.enabled and fp16.dynamic and getattr(fp16, key) == 0:
            works = "Needs more than 0 while the scale is dynamic (loss_scale 0)."
            yield Problem(f"fp16.{key}", "0", works, ("fp16.loss_scale",))
    start = 2.0**fp16.initial_scale_power
    if fp16.enabled and fp16.dynamic and fp16.min_loss_scale > start:
        actual = f"{fp16.min_loss_scale:g}, above the initial scale 2^{fp16.initial_scale_power}"
        works = f"Needs at most {start:g}, or a larger fp16.initial_scale_power."
        yield Problem("fp16.min_loss_scale", actual, works, ("fp16.initial_scale_power",))


def _batch(settings: Settings) -> Iterator[Problem]:
    if settings.elasticity.enabled:
        return
    # A number of stages that depends on the devices is checked when these are known.
    stages = stages_of(settings, max(settings.mesh.pipe, 1))
    problem = batch_problem(batch_keys(settings, settings.mesh.ranks, stages))
    if problem and (mesh := simulated_mesh(settings)[1]):
        problem = replace(problem, works=f"{problem.works} And {mesh}.")
    if problem:
        yield problem


def _elasticity(settings: Settings) -> Iterator[Problem]:
    elasticity = settings.elasticity
    if not elasticity.enabled:
        return
    outside = [key for key in (TRAIN, MICRO, ACCUMULATION) if getattr(settings, key) is not None]
    if outside and not elasticity.ignore_non_elastic_batch_info:
        actual = f"{', '.join(outside)} set in addition to elasticity"
        works = "Remove them, or set elasticity.ignore_non_elastic_batch_info."
        yield Problem(outside[0], actual, works)
    if elasticity.version not in (0.1, 0.2):
        works = "Needs 0.1 or 0.2."
        yield Problem("elasticity.version", f"{elasticity.version:g}", works)
    most, largest = elasticity.max_train_batch_size, max(elasticity.micro_batch_sizes)
    if largest > most:
        actual = f"{largest}, above max_train_batch_size {most}"
        works = f"Needs sizes of at most {most}."
        yield Problem("elasticity.micro_batch_sizes", actual, works)
    elif elasticity.min_gpus > elasticity.max_gpus:
        actual = f"{elasticity.min_gpus}, above max_gpus {elasticity.max_gpus}"
        yield Problem("elasticity.min_gpus", actual, f"Needs at most {elasticity.max_gpus}.")
    elif not elastic_table(elasticity).counts:
        actual = f"no device count from {elasticity.min_gpus} to {elasticity.max_gpus} that fits"
        works = "Widen min_gpus and max_gpus, or raise max_train_batch_size."
        yield Problem("elasticity", actual, works)


def _autotuning(settings: Settings) -> Iterator[Problem]:
    """Yield problems of bounds that exclude every candidate."""
    tuning, section = settings.autotuning, "autotuning"
    if not tuning.enabled:
        return
    for what in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        low, high = getattr(tuning, f"min_{what}"), getattr(tuning, f"max_{what}")
        if high is not None and low > high:
            actual, works = f"{low}, above max_{what} {high}", f"Needs at most {high}."
            yield Problem(f"{section}.min_{what}", actual, works, (f"{section}.max_{what}",))
    batch = settings.train_batch_size
    low, high = tuning.min_train_batch_size, tuning.max_train_batch_size
    if batch is not None and not low <= batch <= (high or batch):
        key = "min_train_batch_size" if batch < low else "max_train_batch_size"
        works = "The search never changes train_batch_size: needs bounds around it."
        actual = f"{getattr(tuning, key)}, while train_batch_size is {batch}"
        yield Problem(f"{section}.{key}", actual, works, ("train_batch_size",))


def _optimizer(settings: Settings) -> Iterator[Problem]:
    optimizer = settings.optimizer
    if optimizer is None or optimizer.type not in OPTIMIZERS:
        return
    params = optimizer.params
    if optimizer.type.endswith(("AdamW", "AdamW8bit")) and params.get("adam_w_mode") is False:
        coupled = optimizer.type.replace("AdamW", "Adam")
        works = f'Write type "{coupled}" for a coupled weight decay, or remove adam_w_mode.'
        actual = f'false with type "{optimizer.type}"'
        yield Problem("optimizer.params.adam_w_mode", actual, works)
    offload = settings.zero_optimization.offload_optimizer
    encoded = any(map(LEAST_SIZE.fullmatch, params))
    if offload.device != "none" and offload.where == "host" and encoded:
        path, works = "zero_optimization.offload_optimizer.where", 'Needs "device".'
        actual = f'"host", while optimizer.type is {optimizer.type}'
        yield Problem(path, actual, works, ("optimizer.type",), fix={path: "device"})
    if settings.bf16.enabled and settings.bf16.bf16_optimizer_states and encoded:
        works = "Remove it: moments have 8 bits, and those of small parameters are fp32."
        yield Problem("bf16.bf16_optimizer_states", f"true with {optimizer.type}", works)
    is_sgd = optimizer.type == "SGD"
    if is_sgd and params["nesterov"] and not (params["momentum"] > 0 == params["dampening"]):
        actual = f"true with momentum {params['momentum']} and dampening {params['dampening']}"
        works = "Needs a momentum above 0 and a dampening of 0."
        yield Problem("optimizer.params.nesterov", actual, works)
    if params.get("min_coeff", 0) > params.get("max_coeff", 0):
        actual = f"{params['min_coeff']}, above max_coeff {params['max_coeff']}"
        yield Problem("optimizer.params.min_coeff", actual, f"Needs at most {params['max_coeff']}.")
    for number, group in enumerate(optimizer.groups):
        path = f"optimizer.groups.{number}"
        has_options = group.lr_factor != 1 or group.weight_decay is not None
        if group.frozen and has_options:
            works = "A frozen group is not updated: remove lr_factor and weight_decay."
            yield Problem(path, "frozen with lr_factor or weight_decay", works)
        elif not group.frozen and not has_options:
            works = "Needs lr_factor, weight_decay or frozen."
            yield Problem(path, f'only the pattern "{group.pattern}"', works)


def _schedule(settings: Settings) -> Iterator[Problem]:
    if settings.scheduler is None or settings.scheduler.type not in SCHEDULERS:
        return
    params = settings.scheduler.params
    for low, high in (("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr")):
        if low in params and high in params and params[low] > (params[high] or params[low]):
            path, actual = f"scheduler.params.{low}", f"{params[low]}, above {high} {params[high]}"
            about = (f"scheduler.params.{high}", "optimizer.params.lr")
            yield Problem(path, actual, f"Needs at most {params[high]}.", about)


def _gradients(settings: Settings) -> Iterator[Problem]:
    stage = settings.zero_optimization.stage
    if settings.parallel.gradient_reduction == "step" and stage >= 2:
        actual = f'"step" with ZeRO stage {stage}'
        works = 'Stages 2 and 3 hold only a shard of the gradient: write "micro_batch" or "auto".'
        about = ("zero_optimization.stage",)
        yield Problem("parallel.gradient_reduction", actual, works, about)
    if settings.zero_optimization.mics_shard_size != -1 and stage == 0:
        works = "Needs a stage that shards: 1, 2 or 3."
        about = ("zero_optimization.stage",)
        yield Problem("zero_optimization.mics_shard_size", "a shard size at stage 0", works, about)


def _tensor(settings: Settings) -> Iterator[Problem]:
    parallel, key = settings.parallel, "parallel.sequence_parallel_activations"
    overlap = parallel.tensor_overlap
    if overlap.startswith("ring") and not parallel.sequence_parallel_activations:
        actual = f'"{overlap}" without sequence-parallel activations'
        works = f'It overlaps their gathers and scatters: set {key}, or write "auto".'
        yield Problem("parallel.tensor_overlap", actual, works, (key,))
    if parallel.sequence_parallel_activations and isinstance(parallel.sequence_tiles, int):
        tiles = "parallel.sequence_tiles"
        actual = f"{parallel.sequence_tiles} with sequence-parallel activations"
        works = (
            'They shard the sequence over tensor, where tiles would not: write "auto" or "none".'
        )
        yield Problem(tiles, actual, works, (key,))
    if settings.tensor_parallel.tp_overlap_comm and overlap == "none":
        actual = 'true, while parallel.tensor_overlap is "none"'
        works = "They contradict each other: remove one."
        yield Problem(
            "tensor_parallel.tp_overlap_comm", actual, works, ("parallel.tensor_overlap",)
        )


def _recompute(settings: Settings) -> Iterator[Problem]:
    checkpointing, remat = settings.activation_checkpointing, settings.parallel.remat
    key = "parallel.remat"
    is_set = "remat" in settings.parallel.model_fields_set
    section = "activation_checkpointing"
    for name in ("partition_activations", "cpu_checkpointing", "number_checkpoints"):
        if getattr(checkpointing, name) and is_set and remat == "none":
            works = f'It applies to saved residuals: remove one, or write {key} "full".'
            yield Problem(f"{section}.{name}", f'set, while {key} is "none"', works, (key,))
    if checkpointing.number_checkpoints and is_set and remat not in ("none", "full"):
        works = "Both set what is saved: remove one."
        yield Problem(f"{section}.number_checkpoints", f"set together with {key}", works, (key,))
    if checkpointing.cpu_checkpointing and isinstance(remat, dict) and "budget" in remat:
        works = "A budget itself chooses what is offloaded: remove one."
        yield Problem(f"{section}.cpu_checkpointing", f"true with a budget in {key}", works)
    for name, first, second in recompute_of(remat, None, False, None).duplicates():
        works = "Needs each name in one list."
        yield Problem(key, f'"{name}" in both {first} and {second}', works)
    saves = settings.parallel.pipeline_recompute == "save" and settings.mesh.pipe != 1
    if saves and isinstance(remat, dict) and remat.get("offload"):
        works = (
            "Residuals that stages save between ticks cannot be offloaded by name: use save, not "
            "offload, or activation_checkpointing.cpu_checkpointing, or another "
            "parallel.pipeline_recompute."
        )
        about = ("parallel.pipeline_recompute",)
        actual = f'offload of {len(remat["offload"])} names with parallel.pipeline_recompute "save"'
        yield Problem(key, actual, works, about)
    layers = settings.parallel.pipeline_recompute == "layers"
    if layers and is_set and remat not in ("none", "full") and settings.mesh.pipe != 1:
        actual = f'"layers", while {key} is {shown(remat)}'
        works = f'It needs {key} "full": make them equal, or remove one.'
        yield Problem("parallel.pipeline_recompute", actual, works, (key,))


def _model(settings: Settings) -> Iterator[Problem]:
    model = settings.model
    if model is None:
        return
    named, alone = model.named, model.model_fields_set == {"quantize"}
    if (quantize := model.quantize) is not None and quantize.weights == "int8":
        works = 'Remove it, or set model.quantize.weights "nf4" or "fp4": int8 has a scale a row.'
        for key in ("block", "double"):
            if key in quantize.model_fields_set:
                actual = f"{shown(getattr(quantize, key))}, while model.quantize.weights is int8"
                yield Problem(f"model.quantize.{key}", actual, works)
    if len(named) != 1 and not alone:
        actual = " and ".join(named) or "neither family nor factory nor pretrained"
        works = "Needs exactly one of model.family, model.factory and model.pretrained."
        yield Problem("model", actual, works)
    elif model.preset is not None and model.family is None:
        works = "Presets belong to families; set the sizes of a factory in model.config."
        yield Problem("model.preset", f'"{model.preset}" with {named[0]}', works)
    elif model.family is not None:
        yield from _family(model.family, model.preset)


def _family(name: str, preset: str | None) -> Iterator[Problem]:
    """Yield the problem of a name that is none, as the source of the models has it."""
    spec = importlib.util.find_spec("jaxspeed.models")
    if spec is None or "jaxspeed.models" in sys.modules:  # which may have others
        return
    folder = Path((spec.submodule_search_locations or [""])[0])
    if "/" in name:
        works = f"An id of the hub, or a folder, is model.pretrained: {shown(name)}."
        yield Problem("model.family", shown(name), works)
    elif not (file := folder / f"{name}.py").is_file():
        yield unknown_name("model.family", name, _keys(folder / "__init__.py", "FAMILIES"))
    elif preset is not None and preset not in (presets := _keys(file, "PRESETS")):
        yield unknown_name("model.preset", preset, presets)


def _keys(file: Path, table: str) -> list[str]:
    """The keys of a mapping in a module, which is not imported: models import Flax."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == table:
            return [str(ast.literal_eval(key)) for key in getattr(node.value, "keys", ())]
    return []


def _lora(settings: Settings) -> Iterator[Problem]:
    lora = settings.lora
    if lora is None:
        return
    about = ("lora.target_parameters",)
    works = "PEFT has it for modules alone: remove it, or name modules in lora.target_modules."
    if lora.target_parameters and lora.lora_dropout:
        actual = f"{lora.lora_dropout:g} with lora.target_parameters"
        yield Problem("lora.lora_dropout", actual, works, about)
    if lora.target_parameters and lora.use_dora:
        yield Problem("lora.use_dora", "true with lora.target_parameters", works, about)
    if settings.trainable is not None:
        works = "lora decides what is trained: write lora.modules_to_save, and remove trainable."
        yield Problem("trainable", "set, with lora", works, ("lora",))


def _run(settings: Settings) -> Iterator[Problem]:
    if settings.run.epochs is not None and settings.run.steps is not None:
        actual = f"{settings.run.epochs:g}, while run.steps is {settings.run.steps}"
        yield Problem("run.epochs", actual, "Remove one: each is the run's length.", ("run.steps",))
    if "://" in (settings.run.output or ""):
        works = "Needs a local folder; run.checkpoints takes a URL."
        yield Problem("run.output", f'"{settings.run.output}"', works)


FILES = ("text", "jsonl", "json", "parquet", "arrow", "huggingface", "tokens", "images")


def _data(settings: Settings) -> Iterator[Problem]:
    data = settings.data
    if data.mixture and (data.source or data.path or data.paths):
        actual = f"{len(data.mixture)} sources, while data has a source too"
        yield Problem("data.mixture", actual, "Put all sources into the mixture.")
        return
    if data.eval is not None and data.held_out and "held_out" in data.model_fields_set:
        works = "Remove one: evaluation is on data.eval, or on a share of the training data."
        yield Problem("data.held_out", f"{data.held_out}, while data.eval is set", works)
    if data.tokenizer == "bpe" and settings.model is not None and settings.model.pretrained:
        works = "Remove it: pretrained weights know the tokens of their own tokenizer."
        yield Problem("data.tokenizer", '"bpe", with model.pretrained', works)
    if data.held_out == 1:
        yield Problem(
            "data.held_out", "1", "Needs less than 1: some samples must remain for training."
        )
    parts: list[tuple[str, SourceSection]] = [
        (f"data.mixture.{i}", part) for i, part in enumerate(data.mixture)
    ]
    parts = parts or [("data", data)]
    if data.eval is not None:
        parts.append(("data.eval", data.eval))
    for where, corpus in parts:
        if corpus.path and corpus.paths:
            yield Problem(f"{where}.path", "set together with data.paths", "Put all in paths.")
        paths = corpus.path or corpus.paths
        if corpus.source in FILES and not paths:
            yield Problem(f"{where}.path", "nothing", f'Source "{corpus.source}" needs a path.')
        if corpus.dtype and corpus.source not in ("tokens", None):
            actual = f'"{corpus.dtype}", while the source is "{corpus.source}"'
            works = (
                "Only raw files of the source tokens need it. `eval --data` reads it from "
                '{"dtype": ...} in a file meta.json beside a raw file.'
            )
            yield Problem(f"{where}.dtype", actual, works)
        if corpus.source in (None, "stdlib", "synthetic") and paths:
            actual = f"{corpus.source or 'stdlib'}, which reads no path"
            works = f"Needs one of {', '.join(FILES)}, to read the path."
            yield Problem(f"{where}.source", actual, works, (f"{where}.path",))
        known = (None, "stdlib", "synthetic", *FILES)
        if corpus.source not in known and ":" not in str(corpus.source):
            works = f"Needs one of {', '.join(map(str, known[1:]))}, or package.module:name."
            yield Problem(f"{where}.source", f'"{corpus.source}"', works)


def simulated_mesh(settings: Settings) -> tuple[dict[str, int], str]:
    """Sizes of all axes on the simulated devices of `run.devices`, or why they do not fit."""
    count = int((settings.run.devices or "").partition(":")[2] or 0)
    sizes = settings.mesh.model_dump()
    fixed, is_open = (
        product([axis for axis in sizes if sizes[axis] != -1], sizes),
        -1 in sizes.values(),
    )
    if not count:
        return {}, ""
    if count % fixed == 0 if is_open else count == fixed:
        return {axis: count // fixed if n == -1 else n for axis, n in sizes.items()}, ""
    shape = ", ".join(f"mesh.{axis} {sizes[axis]}" for axis in axis_names() if sizes[axis] != 1)
    needs = f"a multiple of {fixed}" if is_open else f"{fixed}"
    return {}, (
        f"{shape or 'mesh of all axes 1'} needs {needs} devices, and run.devices "
        f"{settings.run.devices} has {count}; -1 for one axis takes those that remain"
    )
