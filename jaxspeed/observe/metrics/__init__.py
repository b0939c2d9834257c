"""What a run reports: metric names, where records go, where time went, and how far it is.

Plain records in, files and lines out: nothing here knows the engine.
"""

from jaxspeed.memory.devices import peak_flops
from jaxspeed.observe.metrics.flops import (
    ModelFlops,
    language_flops,
    traced_flops,
    utilisation,
)
from jaxspeed.observe.metrics.ledger import PHASES, Ledger
from jaxspeed.observe.metrics.names import NAMES
from jaxspeed.observe.metrics.picture import draw_loss
from jaxspeed.observe.metrics.progress import Progress
from jaxspeed.observe.metrics.records import from_json, read_records
from jaxspeed.observe.metrics.sinks import (
    RECORDS,
    CsvSink,
    JsonlSink,
    Sink,
    TensorBoardSink,
    WandbSink,
    sinks_of,
)
from jaxspeed.observe.metrics.sparkline import sparkline

__all__ = [
    "NAMES",
    "PHASES",
    "RECORDS",
    "CsvSink",
    "JsonlSink",
    "Ledger",
    "ModelFlops",
    "Progress",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "draw_loss",
    "from_json",
    "language_flops",
    "peak_flops",
    "read_records",
    "sinks_of",
    "sparkline",
    "traced_flops",
    "utilisation",
]
