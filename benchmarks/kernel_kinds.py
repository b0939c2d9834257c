"""Time of a device by kind of kernel, from a trace of `jax.profiler`; for `gpu_peers.py`."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The first that is found in a kernel's name, in small letters, names its kind. XLA calls its own
# kernels after the fusion's root or kind, and those of cuBLAS and cuDNN have names of theirs.
KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|cudnn_generated|cudnn.*(fort|sm\d+)"),
    ("matmul", r"gemm|cublas|cutlass|nvjet|xmma|wgmma|^dot|matmul|gemv|splitk"),
    ("collective", r"nccl|all.?reduce|all.?gather|reduce.?scatter"),
    ("memory copy or set", r"memcpy|memset|^copy(?!.*fusion)"),
    ("scatter, gather, sort", r"scatter|gather|dynamic.?update|dynamic.?slice|sort|radix"),
    ("softmax or norm (Triton)", r"triton|softmax"),
    ("reduction", r"reduce|reduction"),
    ("transpose", r"transpose"),
    ("elementwise", r"fusion|fused|loop_|wrapped|multiply|add|convert|select|broadcast"),
)
MOST = 15  # kernels in the table
_CONTAINERS = ("while", "call", "conditional")  # of a CPU's trace, around what they run


class Kernel(NamedTuple):
    """A run of a kernel on a device."""

    name: str
    start: float  # ns
    duration: float  # ns
    source: str  # the operation of the program, if the trace names it


def kind_of(name: str) -> str:
    """The kind of a kernel of this name."""
    return next((kind for kind, form in KINDS if re.search(form, name.lower())), "other")


def profiled(step: Callable[[int], Any], steps: int) -> dict[str, Any]:
    """Trace `step(0)` ... `step(steps - 1)`, and sum up their kernels.

    XLA launches kernels one by one while a trace is taken, where it uses CUDA graphs else: the time
    in which none runs is an upper bound.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(steps):
                last = step(i)
            jax.block_until_ready(last)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return summary(kernels(jax.profiler.ProfileData.from_file(str(file))), steps)


def kernels(trace: Any) -> Iterator[Kernel]:
    """The kernels of the first GPU, or what XLA runs on a CPU."""
    planes = list(trace.planes)
    gpus = sorted(plane.name for plane in planes if plane.name.startswith("/device:GPU"))
    for plane in planes:
        if plane.name != (gpus[0] if gpus else "/host:CPU"):
            continue
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # the same kernels again, under the names of modules and operations
            for event in line.events:
                about = dict(event.stats)
                if gpus or ("hlo_op" in about and not event.name.startswith(_CONTAINERS)):
                    source = str(about.get("hlo_op", about.get("name", "")))
                    yield Kernel(event.name, event.start_ns, event.duration_ns, source)


def summary(found: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds a step, in total, by kind and of the longest kernels, and while none ran."""
    found = list(found)
    if not found:
        return {"span": 0.0, "busy": 0.0, "kinds": {}, "kernels": []}
    kinds: dict[str, float] = defaultdict(float)
    names: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in found:
        kinds[kind_of(kernel.name)] += kernel.duration
        names[kernel.name, kernel.source].append(kernel.duration)
    a_step = 1e-6 / steps
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:MOST]
    return {
        "span": a_step * (max(k.start + k.duration for k in found) - min(k.start for k in found)),
        "busy": a_step * union(found),
        "kinds": {kind: a_step * time for kind, time in sorted(kinds.items(), key=_time)},
        "kernels": [
            [kind_of(name), name, source, len(times) / steps, a_step * sum(times)]
            for (name, source), times in longest
        ],
    }


def union(found: list[Kernel]) -> float:
    """Nanoseconds in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(found, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        total += max(0.0, end - max(kernel.start, reached))
        reached = max(reached, end)
    return total


def table(profile: dict[str, Any]) -> str:
    """The summary in Markdown."""
    span, busy = profile["span"], profile["busy"]
    if not span:
        return "the trace has no kernels"
    lines = ["", "| kind of kernel | ms a step | of the step |", "|---|---|---|"]
    rows = {**profile["kinds"], "no kernel runs": span - busy}
    lines += [f"| {kind} | {time:.3f} | {time / span:.1%} |" for kind, time in rows.items()]
    lines += [f"| from the first kernel to the end of the last | {span:.3f} | |", ""]
    lines += ["| kind | kernel | operation | runs a step | ms a step |", "|---|---|---|---|---|"]
    for kind, name, source, runs, time in profile["kernels"]:
        lines.append(f"| {kind} | {name[:60]} | {source[:40]} | {runs:g} | {time:.3f} |")
    return "\n".join(lines)


def _time(item: tuple[str, float]) -> float:
    return -item[1]
