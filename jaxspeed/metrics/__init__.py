"""Metrics of a run: names, sinks (JSONL, CSV, TensorBoard, W&B), MFU, progress line, time ledger.

Plain records in, files and lines out; independent of the engine. A name is imported when it is
first used: the lines of a start are shown before JAX is imported.
"""

from typing import TYPE_CHECKING

from jaxspeed.lazy_names import lazy_names
from jaxspeed.metric_names import NAMES

if TYPE_CHECKING:
    from jaxspeed.metrics.format import sparkline
    from jaxspeed.metrics.ledger import PHASES, TimeLedger
    from jaxspeed.metrics.loss_curve import draw_loss
    from jaxspeed.metrics.mfu import (
        ModelFlops,
        counted_tokens,
        language_flops,
        program_model_flops,
        traced_flops,
        utilisation,
    )
    from jaxspeed.metrics.progress import Progress
    from jaxspeed.metrics.records import from_json, read_records
    from jaxspeed.metrics.sinks import (
        CsvSink,
        JsonlSink,
        Sink,
        TensorBoardSink,
        monitors_of,
        require_monitors,
        sinks_of,
    )

_NAMES = {
    "format": ("sparkline",),
    "ledger": ("PHASES", "TimeLedger"),
    "loss_curve": ("draw_loss",),
    "mfu": (
        *("ModelFlops", "counted_tokens", "language_flops", "program_model_flops"),
        *("traced_flops", "utilisation"),
    ),
    "progress": ("Progress",),
    "records": ("from_json", "read_records"),
    "sinks": (
        *("CsvSink", "JsonlSink", "Sink", "TensorBoardSink", "monitors_of", "require_monitors"),
        "sinks_of",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

__all__ = [
    "NAMES",
    "PHASES",
    "CsvSink",
    "JsonlSink",
    "ModelFlops",
    "Progress",
    "Sink",
    "TensorBoardSink",
    "TimeLedger",
    "counted_tokens",
    "draw_loss",
    "from_json",
    "language_flops",
    "monitors_of",
    "program_model_flops",
    "read_records",
    "require_monitors",
    "sinks_of",
    "sparkline",
    "traced_flops",
    "utilisation",
]
