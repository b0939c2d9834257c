"""What a run leaves to look at: the loss curve, a sample of text, where things lie."""

import math
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from jaxspeed.observe.metrics import draw_loss, read_records, sparkline
from jaxspeed.run.sampling import sample_text
from jaxspeed.run.trainer import Trainer


def show_ending(console: Console, trainer: Trainer, again: str) -> dict[str, Any]:
    """Prints it, draws `loss.png`, and returns it for programs. `again` continues the run."""
    folder, reached = trainer.folder, trainer.reached
    records = read_records(folder.metrics)
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    held_out = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    entropy = trainer.corpus.unigram_entropy
    levels = {"unigram entropy": entropy} if entropy else {}
    draw_loss(folder.picture, train, held_out, title=f"{folder.path.name}: loss", levels=levels)
    newest = trainer.checkpointer.latest()
    checkpoint = folder.checkpoints / newest if newest else None
    text = None
    if trainer.stopped_by is None:
        text = _sample(trainer)
    found = {
        "steps": reached.step,
        "stopped_by": trainer.stopped_by,
        "train_loss": reached.train_loss,
        "eval_loss": reached.eval_loss,
        "unigram_entropy": entropy,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "metrics": str(folder.metrics),
        "picture": str(folder.picture),
        "sample": text,
        "again": again,
        **trainer.recorder.seconds,
    }
    console.print()
    console.print(f"loss  {sparkline([loss for _, loss in train], 60)}", highlight=False)
    console.print(_result(trainer), highlight=False)
    if text is not None:
        console.print(Panel(Text(text), title="a sample", title_align="left", expand=False))
    console.print(trainer.recorder.ledger.table())
    console.print()
    if trainer.stopped_by is not None:
        console.print(f"[yellow]stopped by {trainer.stopped_by}[/]; everything is saved")
    for name, value in (
        ("loss curve", folder.picture),
        ("metrics", folder.metrics),
        ("checkpoint", checkpoint),
        ("go on with", again),
    ):
        console.print(f"{name:<11} {value}", highlight=False, soft_wrap=True, markup=False)
    return found


def _result(trainer: Trainer) -> str:
    reached = trainer.reached
    parts = [f"step {reached.step}: training loss {reached.train_loss or math.nan:.4f}"]
    entropy = trainer.corpus.unigram_entropy
    if reached.eval_loss is not None:
        parts.append(f"held-out loss {reached.eval_loss:.4f}")
        if entropy:
            parts.append(
                f"{reached.eval_loss / entropy:.2f} of the corpus's unigram entropy, {entropy:.4f}"
            )
    return ", ".join(parts)


def _sample(trainer: Trainer) -> str | None:
    run, corpus = trainer.config.run, trainer.corpus
    if corpus.tokenizer is None or not run.sample_tokens:
        return None
    return "".join(sample_text(trainer.engine, corpus))
