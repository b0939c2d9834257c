"""Sequence parallelism: the sequence dims of any model, sharded over the axis `seq`.

The program stays in the global view. The pass finds the sequence dims by dim propagation from the
batch's token arrays, constrains activations on them, and replaces each attention by a form that
communicates over the axis (`shard_sequence`); what else mixes positions is left to XLA.
"""

from jaxspeed.sequence_parallel.shard_sequence import SequenceSettings

__all__ = ["SequenceSettings"]
