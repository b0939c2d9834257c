"""Sequences over the axis `seq`: attention in a form that communicates, the rest by constraints.

The dims are found by dim propagation (`tensor_parallel/sequence_dims.py`), and the walk that writes
the constraints of tensor parallelism writes those along the sequence, too
(`tensor_parallel/insert_constraints.py`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import jax

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.traverse import JaxprEqn, Var, shape_of
from jaxspeed.ops.attention_call import body_of, form_of
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.ops.sequence_attention import SequenceForm, over_sequence
from jaxspeed.sequence_parallel.attention_report import AttentionNotes, AttentionRun
from jaxspeed.sequence_parallel.choose_form import choose_form, name_of
from jaxspeed.sequence_parallel.settings import SequenceSettings
from jaxspeed.tensor_parallel.dim_propagation import CallFrame
from jaxspeed.tensor_parallel.insert_constraints import Sequences

log = logging.getLogger("jaxspeed")


def sequences(
    positions: Mapping[Var, int],
    settings: SequenceSettings,
    also: tuple[str, ...] = (),
    notes: AttentionNotes | None = None,
) -> Sequences:
    """The sequences of a program, of whose inputs `positions` are the sequence dims.

    `notes` are filled for a report, instead of a log and an error.
    """

    def attend(
        eqn: JaxprEqn, sharded: Sequence[bool], frame: CallFrame
    ) -> Callable[..., jax.Array] | None:
        """The attention over the axis; None if its queries are not sharded along dim 1."""
        form, free = form_of(eqn), free_axes()
        if form is None or not (sharded[0] or form.zigzag) or free.get(SEQ, 1) == 1:
            return None
        q, k = map(shape_of, eqn.invars[:2])
        try:
            how, why = choose_form(form, q, k, settings, free[SEQ], free.get(TENSOR, 1))
        except ConfigError as problem:
            if notes is None:
                raise
            notes.refused.append(str(problem))
            return None
        if notes is None:
            _note_form(how, q[1:3], k[1:3], free[SEQ], why)
        else:
            run = AttentionRun(frame.times, name_of(how), how.layout, why, _shapes(q[1:3], k[1:3]))
            notes.runs[id(frame), id(eqn)] = run
        return partial(over_sequence, form, how, body_of(eqn))

    return Sequences(positions, attend, also)


@cache
def _note_form(
    how: SequenceForm, q: tuple[int, ...], k: tuple[int, ...], devices: int, why: str
) -> None:
    """Note once how an attention runs; the loss is traced several times."""
    how_text = f"{name_of(how)}, {how.layout}"
    of = _shapes(q, k)
    log.info("attention (%s) over seq %d: %s, because %s", of, devices, how_text, why)


def _shapes(q: tuple[int, ...], k: tuple[int, ...]) -> str:
    return f"{q[0]} queries of {q[1]} heads, {k[0]} keys of {k[1]} heads"
