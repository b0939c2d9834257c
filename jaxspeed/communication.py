"""The record of a communication: a collective, a host transfer, or one with parameter servers.

Records come from a compiled program (`hlo/collectives.py`), from a traced one
(`tensor_parallel/boundary_costs.py`, `planner/time`), or from a formula (`pipeline/cost_report.py`,
`parameter_server/programs.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
TO_HOST, FROM_HOST = "device-to-host", "host-to-device"
PULL, PUSH = "pull", "push"  # parameters to a worker, gradients to the servers
Sent = tuple[int, Any]  # an array's elements and dtype
_SENT_UNCHANGED = ("collective-permute", "collective-broadcast", TO_HOST, FROM_HOST, PULL, PUSH)


@dataclass(frozen=True)
class Communication:
    """One communication of a program, as each device sees it.

    Attributes:
      kind: one of `COLLECTIVES`, a host transfer (`TO_HOST`, `FROM_HOST`), or between a worker and
        its servers (`PULL`, `PUSH`).
      axes: the mesh axes of a collective, in the mesh's order; () of others.
      bytes: the payload of one run: what an all-gather gathered, what a reduce-scatter or an
        all-to-all was given, the operand of the others (of a ragged all-to-all all rows, also those
        that are not sent).
      runs: how often it runs per execution, with the trip counts of all loops.
      source: where the record comes from; `run` was measured.
      dtype: of the payload, as in HLO; `bf16+f32` where unlike arrays were combined.
      elements: the payload's elements.
      leaves: the arrays that were combined into it.
      group_size: the devices of one group; for a permute, those that send.
      purpose: what it sends: parameters, gradients, activations, ...
      site: its place: an op_name of HLO, a parameter's path, why a sharding needs it.
      backward: whether it is in the backward pass; False if unknown.
      in_accumulation: whether it is inside the loop over micro-batches; only known from HLO.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    runs: int
    source: Literal["hlo", "trace", "formula", "run"]
    dtype: str = ""
    elements: int = 0
    leaves: int = 1
    group_size: int = 1
    purpose: str = ""
    site: str = ""
    backward: bool = False
    in_accumulation: bool = False

    @classmethod
    def of_arrays(
        cls, kind: str, axes: tuple[str, ...], arrays: Iterable[Sent], runs: int, **rest: Any
    ) -> "Communication":
        """A record with the bytes, elements and dtype of arrays; PRNG keys count as 0 bytes."""
        sent = list(arrays)
        return cls(
            kind,
            axes,
            sum(elements * getattr(dtype, "itemsize", 0) for elements, dtype in sent),
            runs,
            dtype=dtypes_text(dtype for _, dtype in sent),
            elements=sum(elements for elements, _ in sent),
            leaves=len(sent),
            **rest,
        )

    @property
    def payload(self) -> int:
        """The bytes of all runs."""
        return self.bytes * self.runs


def ring_bytes(communication: Communication) -> float:
    """The bytes that a device sends in all runs, if the group forms a ring."""
    return ring_share(communication.payload, communication.kind, communication.group_size)


def ring_elements(communication: Communication) -> float:
    """`ring_bytes` in elements."""
    return ring_share(
        communication.elements * communication.runs, communication.kind, communication.group_size
    )


def ring_share(payload: int, kind: str, devices: int) -> float:
    """The part of a payload that each of N devices sends in a ring.

    all-reduce 2 (N-1)/N of the payload; reduce-scatter, all-gather and all-to-all (N-1)/N; a
    permute, a broadcast and what is no collective: all of it.
    """
    if kind in _SENT_UNCHANGED:
        return float(payload)
    return payload * ring_passes(kind) * (devices - 1) / devices


def ring_passes(kind: str) -> int:
    """The ring phases of a collective: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if kind == "all-reduce" else 1


def dtypes_text(dtypes: Iterable[Any]) -> str:
    """HLO's dtype names, joined: `bf16+f32`."""
    return "+".join(sorted(map(dtype_text, set(dtypes))))


def dtype_text(dtype: Any) -> str:
    """bfloat16 as bf16, int32 as s32, as compilers write them."""
    name = str(dtype)
    for numpy, hlo in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        name = name.replace(numpy, hlo)
    return name
