"""Sequence parallelism: the sequence dims of any model, sharded over the axis `seq`.

The program stays in the global view. Sequence dims are found by dim propagation from the batch's
token arrays, activations are constrained on them, and each attention is replaced by a form that
communicates over the axis (`shard_sequence`, `choose_form`); what else mixes positions is left to
XLA. Attention that a model writes itself is recognized (`find_attention`).
"""

from jaxspeed.sequence_parallel.attention_report import AttentionNotes, AttentionReport
from jaxspeed.sequence_parallel.find_attention import LeftAlone, with_attention_calls
from jaxspeed.sequence_parallel.recognized_attention import LowProducts
from jaxspeed.sequence_parallel.settings import SequenceSettings
from jaxspeed.sequence_parallel.shard_sequence import sequences

__all__ = [
    "AttentionNotes",
    "AttentionReport",
    "LeftAlone",
    "LowProducts",
    "SequenceSettings",
    "sequences",
    "with_attention_calls",
]
