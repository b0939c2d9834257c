"""Splitting of a traced loss into unlike stages, by the stage of each parameter.

    branch s (inputs, weights of stage s, message of stage s - 1) -> message to stage s + 1
    after(inputs, message of the last stage) -> outs

An equation runs on the first stage on which all that it reads exists; what depends on the inputs
alone, or on parameters that several stages share, is computed again wherever it is read, and so is
another shape of an array. What is
read on a later stage is sent through all stages between (skip connections, an encoder's output). So
the messages of all stages have equal shapes: a buffer per dtype, with room for the largest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.axes import summing_axes
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.inline_calls import with_calls_inlined
from jaxspeed.jaxpr.primitives import RESHAPES
from jaxspeed.jaxpr.sample_independence import Analysis, UnlikeTracesError
from jaxspeed.jaxpr.sample_values import MIXED, SAMPLES, Values, free, samples
from jaxspeed.jaxpr.slicing import read_by, renamed, slice_of, sub_jaxpr
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.pipeline.partition_stages import uses_of_parameters
from jaxspeed.placement.stacks import UnlikeStages

_ALONE = (
    "Stages of unlike blocks ({}) are computed by each data rank of its own samples alone; set "
    "mesh.data and mesh.replica to 1, or move that out of the blocks"
)
NOWHERE = -1  # the stage of what is computed wherever it is read


@dataclass(frozen=True)
class Messages:
    """What each stage sends to the next, packed into one buffer per dtype.

    A buffer is [samples, ...], so that data ranks can shard it, or [1, ...] where no data rank does
    and what is sent need not have samples.
    """

    sent: Sequence[Sequence[Any]]  # for each stage the variables in its message
    lead: int
    least: Mapping[str, int] = field(default_factory=dict)  # of a buffer's room, by dtype

    def _size(self, v: Any) -> int:
        return int(v.aval.size) // self.lead

    @cached_property
    def _room(self) -> dict[str, int]:
        dtypes = sorted({str(v.aval.dtype) for values in self.sent for v in values})
        return {
            dtype: max(
                self.least.get(dtype, 0),
                *(sum(self._size(v) for v in m if v.aval.dtype == dtype) for m in self.sent),
            )
            for dtype in dtypes
        }

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers."""
        pairs = self._room.items()
        return [jax.ShapeDtypeStruct((self.lead, room), dtype) for dtype, room in pairs]

    def pack(self, stage: int, values: Sequence[Any]) -> list[Any]:
        """The buffers of a stage's message."""
        buffers = []
        for like in self.shapes:
            parts = [x.reshape(self.lead, -1) for x in values if x.dtype == like.dtype]
            missing = like.shape[1] - sum(part.shape[1] for part in parts)
            blank = jnp.zeros((self.lead, missing), like.dtype)
            buffers.append(jnp.concatenate([*parts, blank], axis=1))
        return buffers

    def unpack(self, stage: int, buffers: Sequence[Any]) -> list[Any]:
        """The values of the message that a stage sent."""
        by_dtype = dict(zip(self._room, buffers, strict=True))
        start = dict.fromkeys(self._room, 0)
        values = []
        for v in self.sent[stage]:
            dtype, size = str(v.aval.dtype), self._size(v)
            part = by_dtype[dtype][:, start[dtype] : start[dtype] + size]
            start[dtype] += size
            values.append(part.reshape(v.aval.shape))
        return values


@dataclass(frozen=True)
class UnlikeParts:
    """The parts of a loss, with the attributes of `LossParts` that execution reads."""

    constants: Sequence[Any]
    inputs: Sequence[Any]
    before: Any  # the message into the first stage: blank
    after: Any
    context_reads: Sequence[int]  # the indices of the inputs that a stage reads
    messages: Messages
    weights: Mapping[str, Any]  # the variables of the stages' own parameters, by path
    branches: Sequence[Any]  # for each stage a jaxpr
    batch: Sequence[Any]  # the inputs that are arrays of the batch

    @property
    def carry(self) -> list[jax.ShapeDtypeStruct]:
        return self.messages.shapes

    def branch(
        self,
        stage: int,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        params: Mapping[str, Any],
        context: Sequence[Any],
        carry: Sequence[Any],
    ) -> list[Any]:
        """A stage's message, from its parameters by path, the inputs and the message before.

        `run` evaluates the stage's jaxpr.
        """
        jaxpr = self.branches[stage]
        operands = dict(zip([self.inputs[i] for i in self.context_reads], context, strict=True))
        operands |= {self.weights[path]: x for path, x in params.items()}
        if stage:
            values = self.messages.unpack(stage - 1, carry)
            operands |= dict(zip(self.messages.sent[stage - 1], values, strict=True))
        return self.messages.pack(stage, run([operands[v] for v in jaxpr.invars]))

    def of_samples(self, every: "UnlikeParts", ranks: int) -> "UnlikeParts":
        """These parts, of a data rank's samples, with messages that are shards of `every`'s.

        With one sample a loss may be traced otherwise, as without a dim of size 1.

        Args:
          every: the parts of all samples in the global view.
          ranks: the number of data ranks.

        Raises:
          ModelError: the messages do not correspond.
        """
        rooms = {str(x.dtype): x.shape[1] for x in every.messages.shapes}
        messages = replace(self.messages, lead=every.messages.lead // ranks, least=rooms)
        needed = {str(x.dtype): x.shape[1] for x in messages.shapes}
        last = [[v.aval.shape[1:] for v in m.sent[-1]] for m in (messages, every.messages)]
        if needed != rooms or (ranks > 1 and last[0] != last[1]):
            raise _differs(messages.lead, every.messages.lead)
        return replace(self, messages=messages)

    def refuse_other_computation(self, twin: "UnlikeParts", counts: tuple[int, int]) -> None:
        """Refuse stages that compute with the number of samples, as `x / x.shape[0]`.

        Args:
          twin: the parts of another number of samples, traced where these are.
          counts: the numbers of samples of these parts and of the twin's.

        Raises:
          ModelError: a stage computes something else for another number.
        """
        for stage in range(len(self.branches)):
            try:
                sent = self._sent(stage, twin, counts)
            except UnlikeTracesError:
                raise _differs(*reversed(counts)) from None
            if any(x.kind is not SAMPLES or x.degree for x in sent):
                raise _differs(*reversed(counts))

    def _sent(self, stage: int, twin: "UnlikeParts", counts: tuple[int, int]) -> Values:
        """What a stage sends, to the samples of the batch."""
        jaxpr = self.branches[stage]
        before = self.messages.sent[stage - 1] if stage else []
        entering = [
            samples()
            if v in {*self.batch, *before} and v.aval.shape[:1] == (counts[0],)
            else free(v.aval.ndim)
            for v in jaxpr.invars
        ]
        return Analysis(counts, frozenset(summing_axes())).run(
            jaxpr, twin.branches[stage], entering
        )

    def refuse_mixed_samples(self) -> None:
        """Refuse stages that a data rank cannot compute of its samples alone.

        Raises:
          ModelError: an operation mixes samples, or draws or numbers them.
        """
        lead = self.messages.lead
        for stage in range(len(self.branches)):
            of_stage = _ALONE.format(self._blocks(stage))
            sent = self.messages.sent[stage]
            for v, x in zip(sent, self._sent(stage, self, (lead, lead)), strict=True):
                if x.kind is MIXED:
                    raise ModelError(f"mesh.pipe: {x.why}. {of_stage}")
                if x.kind is not SAMPLES or x.dim != 0:
                    raise ModelError(
                        f"mesh.pipe: a {v.aval.str_short()} that later stages read has no first "
                        f"dim of samples. {of_stage}"
                    )
                if x.draws:
                    raise ModelError(f"mesh.pipe: a stage draws numbers for samples. {of_stage}")

    def _blocks(self, stage: int) -> str:
        read = set(self.branches[stage].invars)
        paths = [path for path, v in self.weights.items() if v in read]
        return ", ".join(dict.fromkeys(p.rpartition("/")[0] or p for p in paths[:3])) + ", ..."


def _differs(count: int, every: int) -> ModelError:
    return ModelError(
        f"mesh.pipe: the loss computes something else of {count} samples than of {every}; raise "
        "train_micro_batch_size_per_gpu"
    )


def split_unlike(
    closed: Any,
    parameters: Mapping[Any, str],
    stages: UnlikeStages,
    lead: int,
    batch: Sequence[Any],
) -> UnlikeParts:
    """Split a traced loss by the stages of its parameters.

    Args:
      closed: the traced loss.
      parameters: paths of its variables that are parameters.
      lead: the first dim of messages: the samples where data ranks shard them, else 1.
      batch: the loss's variables that are arrays of the batch.

    Raises:
      ModelError: the parts of a stage do not follow one another.
    """
    weights = {v: path for v, path in parameters.items() if path in stages.stage_of}
    jaxpr = with_calls_inlined(closed.jaxpr, set(weights))
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    stage_of = {v: stages.stage_of[path] for v, path in weights.items()}
    tail = _tail(jaxpr, weights)
    at: list[int] = []
    last = stages.layers
    for number, eqn in enumerate(jaxpr.eqns):
        read = [v for v in eqn.invars if is_var(v)]
        stage = max((stage_of.get(v, NOWHERE) for v in read), default=NOWHERE)
        for v in read:
            if v in weights and stage_of[v] < stage and any(x not in weights for x in read):
                raise ModelError(
                    f"mesh.pipe: {weights[v]} of stage {stage_of[v]} is read after stage {stage} "
                    "began"
                )
        if number in tail and stage != NOWHERE:
            stage = last
        at.append(stage)
        stage_of |= dict.fromkeys(eqn.outvars, stage)
    sent = _sent(jaxpr, at, stage_of, weights, last)
    for v in {v for values in sent for v in values}:
        if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended):
            raise ModelError(f"mesh.pipe: a {v.aval.dtype} cannot be sent from stage to stage")
        if v.aval.size % lead:  # as of a penalty on weights
            raise ModelError(
                f"mesh.pipe: a {v.aval.str_short()} that later stages read has no dim of samples, "
                "of which each data rank has its own; write mesh.data 1, or mesh.pipe 1"
            )
    branches = []
    for stage in range(last):
        before = sent[stage - 1] if stage else []
        eqns = [
            e
            for e, s in zip(jaxpr.eqns, at, strict=True)
            if s in (NOWHERE, stage) or (s < stage and e.primitive.name in RESHAPES)
        ]
        branches.append(slice_of(jaxpr, eqns, [*inputs, *before], sent[stage]))
    inside = set[Any]().union(*map(read_by, branches)) - weights.keys()
    reads = [i for i, v in enumerate(inputs) if v in inside]
    branches = [b.replace(invars=[v for v in b.invars if v in read_by(b)]) for b in branches]
    messages = Messages(sent, lead)
    rest = [e for e, s in zip(jaxpr.eqns, at, strict=True) if s in (NOWHERE, last)]
    return UnlikeParts(
        closed.consts,
        inputs,
        _blank(jaxpr, inputs, messages),
        _after(jaxpr, rest, inputs, messages),
        reads,
        messages,
        {path: v for v, path in weights.items()},
        branches,
        batch,
    )


def _tail(jaxpr: Any, weights: Mapping[Any, str]) -> set[int]:
    """The equations, by number, on which no use of a stage's parameter depends."""
    uses = uses_of_parameters(jaxpr, weights)
    needed, of_weights, tail = set[Any](), set(weights), set[int]()
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if uses[number] or any(v in needed for v in eqn.outvars):
            needed.update(filter(is_var, eqn.invars))
        else:
            tail.add(number)
    for number, eqn in enumerate(jaxpr.eqns):  # casts of parameters belong to their stage
        read = [v for v in eqn.invars if is_var(v)]
        if read and all(v in of_weights for v in read):
            of_weights.update(eqn.outvars)
            tail.discard(number)
    return tail


def _sent(
    jaxpr: Any,
    at: Sequence[int],
    stage_of: Mapping[Any, int],
    weights: Mapping[Any, str],
    last: int,
) -> list[list[Any]]:
    """The variables, by stage, that it or an earlier one has and a later one reads."""
    until: dict[Any, int] = {}  # in the order of the program
    origin: dict[Any, Any] = {}  # of arrays that have another shape
    for eqn, stage in zip(jaxpr.eqns, at, strict=True):
        if eqn.primitive.name in RESHAPES and is_var(eqn.invars[0]) and stage < last:
            origin[eqn.outvars[0]] = origin.get(eqn.invars[0], eqn.invars[0])
            continue
        for v in filter(is_var, eqn.invars):
            if stage < last:
                v = origin.get(v, v)
            if stage_of.get(v, NOWHERE) != NOWHERE and v not in weights:
                until[v] = max(until.get(v, NOWHERE), stage)
    for v in filter(is_var, jaxpr.outvars):
        if stage_of.get(v, NOWHERE) != NOWHERE:
            until[v] = last
    return [[v for v, end in until.items() if stage_of[v] <= s < end] for s in range(last)]


def _blank(jaxpr: Any, inputs: Sequence[Any], messages: Messages) -> Any:
    blank = jax.make_jaxpr(lambda: [jnp.zeros(x.shape, x.dtype) for x in messages.shapes])().jaxpr
    return jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=blank.outvars, eqns=blank.eqns, effects=set()
    )


def _after(jaxpr: Any, eqns: Sequence[Any], inputs: Sequence[Any], messages: Messages) -> Any:
    """What follows the last stage; its inputs are followed by the last stage's message."""
    last = len(messages.sent) - 1
    opened = jax.make_jaxpr(lambda buffers: messages.unpack(last, buffers))(messages.shapes).jaxpr
    names = dict(zip(messages.sent[last], opened.outvars, strict=True))
    eqns = [e.replace(invars=renamed(e.invars, names)) for e in eqns]
    every = sub_jaxpr(jaxpr, [*opened.eqns, *eqns], [], renamed(jaxpr.outvars, names))
    return slice_of(every, every.eqns, [*inputs, *opened.invars], every.outvars)
