"""Flops and bytes of a compiled program, per device, with the trip counts of its loops.

`compiled.cost_analysis()` counts a loop's body once on CPU and TPU, so both are counted here from
the compiled program. They include recomputation and replicated work: *hardware* flops. Model flops
(for MFU) are a property of the model, not of the program.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from jaxspeed.hlo.parser import Computation, Instruction, Module, Shape, parse
from jaxspeed.hlo.trip_counts import Site, walk

# Custom calls that compute nothing.
_PLUMBING = {
    "AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast",
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "MoveToHost", "MoveToDevice",
    "annotate_device_placement", "PinToDevice", "PinToDeviceSram",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "opt-barrier", "async-start",
    "async-update", "async-done",
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Cost of one execution per device.

    Attributes:
      flops: of matmuls and convolutions, 2 per multiply-add, without element-wise work.
      bytes_accessed: bytes that the instructions read and write: of a fusion its inputs and
        outputs, of a slice only the slice.
      uncounted: kernels whose flops the program does not show (`tpu_custom_call`, a cuDNN call).
    """

    flops: int
    bytes_accessed: int
    uncounted: tuple[str, ...]


def cost(program: str | Module, scope: str | None = None) -> Cost:
    """Count `compiled.as_text()`, or what was traced under `jax.named_scope(scope)` alone."""
    module = parse(program)
    flops = accessed = 0
    uncounted: dict[str, None] = {}
    for site in walk(module):
        if scope and scope not in site.instruction.op_name.split("/"):
            continue
        site_flops = _own_flops(site)
        if site_flops is None:
            uncounted[_target(site.instruction)] = None
        flops += (site_flops or 0) * site.runs
        if site.fusion is None:
            accessed += _bytes_accessed(module, site) * site.runs
    return Cost(flops, accessed, tuple(uncounted))


def _own_flops(site: Site) -> int | None:
    """Flops of one run; None if they are unknown (a custom kernel)."""
    instruction = site.instruction
    if instruction.opcode == "dot":
        left = site.computation.operands(instruction)[0].arrays[0]
        return _dot_flops(instruction, left, _ints(instruction.attribute("lhs_contracting_dims")))
    if instruction.opcode == "convolution":
        left, right = (value.arrays[0] for value in site.computation.operands(instruction))
        return _convolution_flops(instruction, left, right)
    if instruction.opcode == "custom-call":
        # The dims of a GPU library's matmul are in its backend config.
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        if contracted:
            left = site.computation.operands(instruction)[0].arrays[0]
            return _dot_flops(instruction, left, _ints(contracted.group(1)))
        return 0 if _target(instruction) in _PLUMBING else None
    return 0


def _dot_flops(instruction: Instruction, left: Shape, contracting: list[int]) -> int:
    """2 M N K: two per result element and contracted element."""
    return 2 * instruction.arrays[0].elements * math.prod(left.dims[dim] for dim in contracting)


def _convolution_flops(instruction: Instruction, left: Shape, right: Shape) -> int:
    """2 x batch x output features x (input features / groups) x overlapping position pairs.

    XLA:TPU writes every matmul as a convolution, with batch dims as windows whose dilation makes
    each position overlap one other; so pairs are counted, not derived.
    """
    labels, out_labels = (instruction.attribute("dim_labels") or "").split("->")
    left_labels, right_labels = labels.split("_")
    out = instruction.arrays[0]
    window = _window(instruction.attribute("window"), sum(c.isdigit() for c in out_labels))
    pairs = 1
    for dim, spatial in enumerate(sorted(c for c in out_labels if c.isdigit())):
        pairs *= _meeting_pairs(
            window[dim],
            left.dims[left_labels.index(spatial)],
            right.dims[right_labels.index(spatial)],
            out.dims[out_labels.index(spatial)],
        )
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    batch = left.dims[left_labels.index("b")] // batch_groups
    features = right.dims[right_labels.index("i")] * out.dims[out_labels.index("f")]
    return 2 * batch * features * pairs


@dataclass(frozen=True)
class _Window:
    stride: int = 1
    low_padding: int = 0
    base_dilation: int = 1
    window_dilation: int = 1


def _window(text: str | None, dims: int) -> list[_Window]:
    """`{size=2x4 stride=1x3 pad=1_1x3_3 lhs_dilate=2x4 rhs_dilate=1x1}`, one for each dim."""

    def values(key: str, default: str) -> list[str]:
        match = re.search(rf"\b{key}=([\d_x\-]+)", text or "")
        return match.group(1).split("x") if match else [default] * dims

    return [
        _Window(int(stride), int(pad.split("_")[0]), int(base), int(window))
        for stride, pad, base, window in zip(
            values("stride", "1"),
            values("pad", "0_0"),
            values("lhs_dilate", "1"),
            values("rhs_dilate", "1"),
            strict=True,
        )
    ]


def _meeting_pairs(window: _Window, base: int, size: int, out: int) -> int:
    """Number of (output, window) position pairs on an element of the base, not on padding."""
    starts = np.arange(out) * window.stride - window.low_padding
    pairs = 0
    for k in range(size):
        at = starts + k * window.window_dilation
        met = (at % window.base_dilation == 0) & (at >= 0) & (at < base * window.base_dilation)
        pairs += int(met.sum())
    return pairs


def _bytes_accessed(module: Module, site: Site) -> int:
    """Bytes that one run of an instruction outside of fusions reads and writes."""
    instruction, computation = site.instruction, site.computation
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or _target(instruction) in _PLUMBING:
        return 0
    operands = computation.operands(instruction)
    if opcode in _SLICES:
        return 2 * instruction.bytes
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * operands[1 if opcode == "dynamic-update-slice" else -1].bytes
    if opcode == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        reads = sum(_read(module, inner, parameter) for parameter in inner.parameters.values())
        return reads + _written(module, inner, inner.root)
    read = sum(operand.bytes for operand in operands)
    if opcode.endswith("-start"):  # its result is often a tuple that contains the operand
        return max(instruction.bytes, 2 * read)
    return instruction.bytes + read


def _read(module: Module, fused: Computation, value: Instruction) -> int:
    """Bytes of `value` that a fused computation reads; of slices only the slice."""
    read = 0
    for user in fused.users[value.name]:
        if user.opcode in _SLICES:
            read += user.bytes if user.operands[0] == value.name else value.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        elif user.opcode == "bitcast":
            read += _read(module, fused, user)
        elif user.opcode == "tuple":
            continue  # passed through
        elif user.opcode == "fusion":
            inner = module.computations[user.called("calls")[0]]
            for number, name in enumerate(user.operands):
                if name == value.name:
                    read += _read(module, inner, inner.parameters[number])
        else:
            return value.bytes
    return min(read, value.bytes)


def _written(module: Module, fused: Computation, value: Instruction) -> int:
    """Bytes that a fused computation writes; of an update in place only the update."""
    if value.opcode == "tuple":
        return sum(_written(module, fused, part) for part in fused.operands(value))
    if value.opcode == "parameter":
        return 0
    if value.opcode == "bitcast":
        return _written(module, fused, fused.operands(value)[0])
    if value.opcode == "dynamic-update-slice":
        return fused.operands(value)[1].bytes
    if value.opcode == "fusion":
        inner = module.computations[value.called("calls")[0]]
        return _written(module, inner, inner.root)
    return value.bytes


def _target(instruction: Instruction) -> str:
    """The name of a custom call's kernel, or ''."""
    return (instruction.attribute("custom_call_target") or "").strip('"')


def _ints(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]
