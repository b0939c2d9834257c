"""`jaxspeed checkpoint list|show|verify|export|import DIR`: inspect, export, import checkpoints."""

import argparse
import contextlib
import datetime
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from jaxspeed.cli.common import add_overrides, command, loaded, out, print_json
from jaxspeed.errors import ConfigError

if TYPE_CHECKING:
    from etils import epath

    from jaxspeed.checkpoint import CheckpointInfo
    from jaxspeed.config import Config
    from jaxspeed.interop import HFForm
    from jaxspeed.user_models.pretrained_model import Weights


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, show and verify a run's checkpoints, export them, import others",
        description="List, show and verify a run's checkpoints, export the weights, and import "
        "checkpoints of DeepSpeed and torch.",
        epilog="example: jaxspeed checkpoint export runs/tiny weights/",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, what, example, function in (
        ("list", "list the checkpoints of a run", "jaxspeed checkpoint list runs/tiny", _list),
        ("show", "show a checkpoint's contents", "jaxspeed checkpoint show runs/tiny", _show),
        (
            "verify",
            "verify every file's checksum; exit code 1 if one differs",
            "jaxspeed checkpoint verify runs/tiny",
            _verify,
        ),
        (
            "export",
            "export the weights as safetensors, one tensor at a time",
            "jaxspeed checkpoint export runs/tiny weights/ --dtype bf16",
            _export,
        ),
        (
            "import",
            "begin a run with a checkpoint of DeepSpeed or torch, and its optimizer",
            "jaxspeed checkpoint import output/ runs/mine --config ds_config.json",
            _import,
        ),
    ):
        verb = command(verbs, name, what, example, config=False)
        if name == "import":
            verb.add_argument("folder", metavar="DIR", help="a folder of DeepSpeed's or of DCP's")
            verb.add_argument("output", metavar="OUT", help="the folder of the run that begins")
            verb.add_argument("--config", required=True, help="the config of that run")
            verb.add_argument("--map", help="a file with a mapping table, if not the family's")
            add_overrides(verb)
            verb.set_defaults(run=function)
            continue
        verb.add_argument("folder", metavar="DIR", help="a run's folder, or that of checkpoints")
        if name == "export":
            verb.add_argument("out", metavar="OUT", help="the folder to write to")
            verb.add_argument(
                "--format",
                choices=("native", "hf", "peft", "safetensors"),
                help="hf: Hugging Face's, with config.json and the tokenizer; peft: the adapters "
                "alone, as PEFT loads them; safetensors: the tensors by their names in "
                "torch's memory; by default native, the parameters by their paths",
            )
            verb.add_argument(
                "--moments",
                action="store_true",
                help="write the optimizer's state too, with --format safetensors, for dcp.load",
            )
            verb.add_argument(
                "--merge",
                action="store_true",
                help="add the adapters to the weights, in Hugging Face's format",
            )
            verb.add_argument(
                "--config",
                help="names the model, with --format hf or peft, if DIR is not a run's folder; or "
                "where the folder of its base is now",
            )
            verb.add_argument(
                "--dtype", choices=("fp32", "bf16", "fp16"), help="default: as stored"
            )
            verb.add_argument(
                "--ema", action="store_true", help="the moving average of the weights"
            )
        if name != "list":
            verb.add_argument("--tag", help="which checkpoint; the newest by default")
        verb.set_defaults(run=function)


def _folder(args: argparse.Namespace) -> str:
    if "://" not in args.folder and not os.path.isdir(args.folder):
        raise ConfigError(f"{args.folder}: no such folder")
    import jax

    from jaxspeed.checkpoint.stores import checkpoints_of, is_local

    jax.config.update("jax_platforms", "cpu")  # these commands read files and need no accelerator
    folder = checkpoints_of(args.folder)
    if is_local(folder) and not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    return str(folder)


def _tag(args: argparse.Namespace, folder: str) -> str | None:
    """The given tag, if there is such a checkpoint."""
    from jaxspeed.checkpoint import Checkpointer

    tags = [info.tag for info in Checkpointer(folder).list() if info.time]
    if not tags:
        raise ConfigError(f"{folder}: holds no checkpoint")
    if args.tag is not None and args.tag not in tags:
        raise ConfigError(f"{folder}: has no checkpoint {args.tag}; it holds {', '.join(tags)}")
    return args.tag if args.tag is None else str(args.tag)


def _list(args: argparse.Namespace) -> int:
    folder = _folder(args)
    from rich.table import Table

    from jaxspeed.checkpoint import Checkpointer
    from jaxspeed.placement.show import bytes_text

    checkpoints = Checkpointer(folder).list()
    if args.json:
        print_json([asdict(info) for info in checkpoints])
        return 0
    if not checkpoints:
        out().print("no checkpoints")
        return 0
    table = Table(box=None)
    for name in ("tag", "step", "size", "written", ""):
        table.add_column(name, justify="left" if name in ("tag", "") else "right")
    for info in checkpoints:
        when = datetime.datetime.fromtimestamp(info.time).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(
            info.tag,
            "-" if info.step is None else str(info.step),
            bytes_text(info.bytes),
            when if info.time else "-",
            "intact" if info.ok else info.problem,
        )
    out().print(table)
    return 0


def _show(args: argparse.Namespace) -> int:
    folder = _folder(args)
    from rich.table import Table

    from jaxspeed.checkpoint import show
    from jaxspeed.placement.show import bytes_text, mesh_text

    info = show(folder, _tag(args, folder))
    if args.json:
        print_json(asdict(info))
        return 0
    console = out()
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    for name, value in (
        ("checkpoint", info.tag if info.ok else f"{info.tag}: {info.problem}"),
        ("size", bytes_text(info.bytes)),
        ("written on", f"{mesh_text(info.mesh)} ({info.device}), ZeRO stage {info.stage}"),
        ("by", f"{info.processes} process(es), {versions}"),
        ("files", ", ".join(info.files) or "none"),
        *([("frozen", _frozen(info))] if info.base else []),
    ):
        console.print(f"{name:<10} {value}", highlight=False, markup=False)
    table = Table(box=None)
    for name in ("array", "shape", "dtype"):
        table.add_column(name, overflow="fold")
    for name, leaf in info.leaves.items():
        dtype = f"{leaf.codec} of {leaf.dtype}" if leaf.arrays else leaf.dtype
        table.add_row(name, "x".join(map(str, leaf.shape)), dtype)
    console.print(table)
    return 0


def _frozen(info: "CheckpointInfo") -> str:
    """What a checkpoint does not have, and where that is."""
    from jaxspeed.placement.paths import counted
    from jaxspeed.placement.show import bytes_text

    assert info.base is not None
    nbytes = bytes_text(sum(leaf.nbytes for leaf in info.excluded.values()))
    count = counted(len(info.excluded), "parameter")
    return f"{count} ({nbytes}) not saved: those of {info.base.folder}"


def _model_of(args: argparse.Namespace) -> tuple["Config", Any]:
    """The config of the run's model, or the one that is given, and the model.

    Raises:
      NoHFForm: it names no model.
    """
    from jaxspeed.config import load_config
    from jaxspeed.interop.exporting import NoHFForm
    from jaxspeed.run.claim import WHOSE
    from jaxspeed.user_models.config_model import resolve_model

    run = _run(args)
    config = args.config
    if config is None:
        try:
            whose = json.loads((run / WHOSE).read_text())
            config = {"model": whose["model"], "objective": whose.get("objective")}
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                f"{args.folder}: is not a run's folder; name the model with --config"
            ) from None
        if config["model"] is None:
            raise NoHFForm(f"{run}: its config names no model; engine.save_pretrained exports it")
    loaded = load_config(config)
    return loaded, resolve_model(loaded)[0]


def _hf_form(args: argparse.Namespace) -> tuple["HFForm", str | None, "Weights | None"]:
    """The form of that model, its base's folder, and the weights in it.

    Raises:
      NoHFForm: it has none.
    """
    from jaxspeed.data.tokenizer import BESIDE
    from jaxspeed.interop.exporting import hf_form

    config, model = _model_of(args)
    base = config.model.pretrained if config.model else None
    form = hf_form(config, model, [_run(args) / name for name in BESIDE])
    return form, base, getattr(model, "weights", None)


def _run(args: argparse.Namespace) -> "epath.Path":
    from etils import epath

    from jaxspeed.run.claim import WHOSE

    folder = epath.Path(args.folder)
    is_inside = folder.name == "checkpoints" and (folder.parent / WHOSE).exists()
    return folder.parent if is_inside else folder


def _verify(args: argparse.Namespace) -> int:
    folder = _folder(args)
    from jaxspeed.checkpoint import Checkpointer, verify

    asked = _tag(args, folder)
    infos = Checkpointer(folder).list()
    tags = [asked] if asked else [info.tag for info in infos if info.time]
    problems = {tag: verify(folder, tag) for tag in tags}
    if args.json:
        print_json(problems)
        return 1 if any(problems.values()) else 0
    console = out()
    for tag, tag_problems in problems.items():
        shown = "; ".join(problem.removeprefix(f"{tag}: ") for problem in tag_problems)
        console.print(f"{tag}: {shown or 'intact'}", highlight=False, markup=False, soft_wrap=True)
    for info in infos:
        if not info.time:
            console.print(f"({info.tag}: {info.problem}; not a checkpoint)", highlight=False)
    return 1 if any(problems.values()) else 0


def _import(args: argparse.Namespace) -> int:
    names = {"folder": args.folder, "map": args.map}
    more = [f"run.import_from.{n}={json.dumps(x)}" for n, x in names.items() if x is not None]
    config = loaded(args, more)
    from jaxspeed.run import open_run, source_of
    from jaxspeed.run.start import checkpointer_of

    source = source_of(config, name=args.config)
    if not checkpointer_of(source).is_empty():
        raise ConfigError(f"{args.output}: has checkpoints already; `jaxspeed train` continues it")
    trainer = open_run(source, out(stderr=args.json))
    try:
        trainer.save()
    finally:
        trainer.close()
        trainer.engine.close()
    step = trainer.reached.step
    if args.json:
        print_json({"step": step, "folder": args.output})
    else:
        out().print(f"{args.output}: begins at step {step}; `jaxspeed train` continues it")
    return 0


def _export(args: argparse.Namespace) -> int:
    if os.path.isfile(args.out):
        raise ConfigError(f"{args.out}: is a file; the export is a folder")
    folder = _folder(args)
    if args.merge and args.format not in (None, "hf"):
        raise ConfigError(f"--merge writes Hugging Face's format; leave out --format {args.format}")
    if args.moments and args.format != "safetensors":
        raise ConfigError("--moments: needs --format safetensors")
    from jaxspeed.interop import export, export_adapter
    from jaxspeed.interop.exporting import NoHFForm
    from jaxspeed.placement.show import bytes_text

    how = {"tag": _tag(args, folder), "dtype": args.dtype, "ema": args.ema}
    form = base = None
    is_native = not args.merge and args.format in (None, "native")
    if is_native and args.config is not None:
        how["weights"] = getattr(_model_of(args)[1], "weights", None)
    elif not is_native:
        # Keys of adapters may be the paths of parameters.
        with contextlib.suppress(*([NoHFForm] if args.format == "peft" else [])):
            form, base, how["weights"] = _hf_form(args)
    if args.format == "safetensors":
        assert form is not None
        form = replace(form, table=form.table.in_memory(), config=None, files=())
        how["moments"] = args.moments
    if args.format == "peft":
        summary = export_adapter(folder, args.out, form=form, base=base, **how)
    else:
        summary = export(folder, args.out, form=form, merge=args.merge, **how)
    if args.json:
        print_json(asdict(summary))
        return 0
    console = out()
    console.print(
        f"{summary.tag}: {summary.tensors} tensors, {bytes_text(summary.bytes)}, in {args.out}: "
        f"{', '.join(map(str, summary.files))}",
        highlight=False,
        soft_wrap=True,
    )
    if summary.left_out:
        console.print(f"left out: {', '.join(summary.left_out)}", highlight=False, soft_wrap=True)
    return 0
