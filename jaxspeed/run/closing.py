"""Summary at the end of a run: loss curve, text sample, wall time, paths, resume command."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from jaxspeed.checkpoint.process_agreement import is_first
from jaxspeed.errors import RunError
from jaxspeed.metrics import draw_loss, from_json, sparkline
from jaxspeed.run.trainer import Trainer

log = logging.getLogger("jaxspeed")
Curve = list[tuple[int, float]]


def show_ending(console: Console, trainer: Trainer, again: str) -> dict[str, Any]:
    """Print the summary, draw the loss curve, and return the summary for JSON.

    `again` is the command that resumes the run. The run is saved, so failures here are warnings.
    """
    folder, reached = trainer.folder, trainer.reached
    first = is_first()
    # Only one process looks at the files of all.
    newest = trainer.checkpointer.latest() if first else None
    text = trainer.sample.text() if trainer.sample and trainer.stopped_by is None else None
    summary = {
        "steps": reached.step,
        "stopped_by": trainer.stopped_by,
        "train_loss": reached.train_loss,
        "eval_loss": reached.eval_loss,
        "unigram_entropy": trainer.corpus.unigram_entropy,
        "checkpoint": str(trainer.checkpointer.folder / newest) if newest else None,
        "adapter": None,
        "metrics": str(folder.metrics),
        "picture": None,
        "sample": text,
        "again": again,
        **trainer.recorder.seconds,
    }
    if not first:
        return summary
    if trainer.has_adapters and trainer.stopped_by is None and folder.adapter.exists():
        summary["adapter"] = str(folder.adapter)
    has_rewards = trainer.completer is not None and trainer.completer.rewards is not None
    name = "reward" if has_rewards else "loss"
    train, held_out = curves(folder.metrics, name)
    summary["picture"] = _drawn(trainer, train, held_out, name)
    console.print()
    console.print(f"{name}  {sparkline([value for _, value in train], 60)}", highlight=False)
    of_rewards = (train, held_out) if has_rewards else None
    console.print(_result(trainer, of_rewards), highlight=False)
    if text is not None:
        console.print(Panel(Text(text), title="a sample", title_align="left", expand=False))
    console.print(trainer.recorder.ledger.table())
    console.print()
    if trainer.stopped_by is not None:
        console.print(f"[yellow]stopped by {trainer.stopped_by}[/]; everything is saved")
    for what, value in (
        (f"{name} curve", summary["picture"]),
        ("metrics", folder.metrics),
        ("checkpoint", summary["checkpoint"]),
        ("adapter", summary["adapter"]),
        ("resume with", again),
    ):
        if value is not None:
            console.print(f"{what:<12} {value}", highlight=False, soft_wrap=True, markup=False)
    return summary


def curves(metrics: Path, name: str = "loss") -> tuple[Curve, Curve]:
    """A metric in training and of held-out data, by step."""
    train: Curve = []
    held_out: Curve = []
    try:
        with metrics.open(encoding="utf-8") as lines:
            for line in lines:  # one at a time: the file of a long run is large
                record = from_json(line)
                for curve, key in ((train, name), (held_out, f"eval_{name}")):
                    if key in record:
                        curve.append((record["step"], record[key]))
    except OSError as error:
        raise RunError(f"{metrics} cannot be read: {error.strerror or error}") from None
    return train, held_out


def _drawn(trainer: Trainer, train: Curve, held_out: Curve, name: str) -> str | None:
    folder, entropy = trainer.folder, trainer.corpus.unigram_entropy
    levels = {"unigram entropy": entropy} if entropy else {}
    try:
        formats = [".svg", ".png"] if importlib.util.find_spec("matplotlib") else [".svg"]
        for suffix in formats:
            path, title = folder.picture.with_suffix(suffix), f"{folder.path.name}: {name}"
            draw_loss(path, train, held_out, title, loss_name=name, levels=levels)
    except OSError as error:
        log.warning("%s cannot be written: %s", folder.picture, error.strerror or error)
        return None
    return str(folder.picture)


def _result(trainer: Trainer, of_rewards: tuple[Curve, Curve] | None) -> str:
    """The last reward and held-out reward of a run by rewards; of any other its losses."""
    reached, entropy = trainer.reached, trainer.corpus.unigram_entropy
    parts = [f"step {reached.step}"]
    if of_rewards is not None:
        names = ("reward", "held-out reward")
        parts += [f"{name} {curve[-1][1]:.3f}" for name, curve in zip(names, of_rewards) if curve]
        return ", ".join(parts)
    if reached.train_loss is not None:
        parts.append(f"training loss {reached.train_loss:.4f}")
    if reached.eval_loss is not None:
        parts.append(f"held-out loss {reached.eval_loss:.4f}")
        if entropy:
            ratio = reached.eval_loss / entropy
            parts.append(f"{ratio:.2f} x the corpus's unigram entropy of {entropy:.4f}")
    return ", ".join(parts)
