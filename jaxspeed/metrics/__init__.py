"""Metrics of a run: names, sinks (JSONL, CSV, TensorBoard, W&B), MFU, progress line, time ledger.

Plain records in, files and lines out; independent of the engine.
"""

from jaxspeed.metric_names import NAMES
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
