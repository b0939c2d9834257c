"""What a step compiles to, as plain numbers; and how it compiles without one of its constraints."""

import contextlib
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed.communication import Communication
from jaxspeed.hardware.targets import Target
from jaxspeed.hlo import collectives, largest_buffers, loop_carry_shapes
from jaxspeed.hlo.cost import cost
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.trip_counts import walk
from jaxspeed.ops import gpu
from jaxspeed.placement.owned import SCOPE as OWNERS
from jaxspeed.planner.compile import child, deviceless_cuda, in_child
from jaxspeed.planner.compile.workers import Workers
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from tests.system import stacks

PACKAGE = Path(jaxspeed.__file__).parent
LAYERS, WIDTH = 3, 1024


@contextlib.contextmanager
def without(site: str | None) -> Iterator[None]:
    """Inside, the constraint of one site leaves its array where the compiler puts it."""
    real = sys.modules["jaxspeed.placement.constrain"].constrain

    def dropping(x: Any, sharding: Any, at: str) -> Any:
        return x if at == site else real(x, sharding, at)

    users = [
        m
        for name, m in list(sys.modules.items())
        if name.startswith("jaxspeed.") and getattr(m, "constrain", None) is real
    ]
    update = sys.modules["jaxspeed.train.update"]
    norm = update.global_norm
    for module in users:
        module.constrain = dropping  # type: ignore[attr-defined]
    if site == "reduce":  # the norm is told the same shards
        update.global_norm = lambda tree, _: norm(tree)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        update.global_norm = norm  # type: ignore[attr-defined]
        for module in users:
            module.constrain = real  # type: ignore[attr-defined]


def sites() -> set[str]:
    """The sites of all constraints that the package's source states."""
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    return set(re.findall(r'constrain\((?:[^"]|\n)*?"([\w.]+)"\)', source))


def stack_program(
    devices: Sequence[jax.Device],
    stage: int,
    accumulation: int = 1,
    form: str = "listed",
    layers: int = LAYERS,
    width: int = WIDTH,
    micro: int = 16,
    **more: Any,
) -> tuple[Program, Any]:
    """A program of `stacks`, and the shapes of its batch."""
    config = stacks.config_of(stage, accumulation=accumulation, micro=micro, **more)
    batch = stacks.batch_of(len(devices) * micro * accumulation, width)
    model = stacks.FORMS[form](layers, width)
    return build_program(config, model, stacks.loss, devices=devices, example_batch=batch), batch


VOCABULARY, EMBED, SEQ, DEPTH, CHUNKS = 8192, 512, 128, 2, 8


def head_program(
    devices: Sequence[jax.Device],
    tied: bool = True,
    accumulation: int = 1,
    stage: int = 3,
) -> tuple[Program, Any]:
    """gpt2 with its head in chunks, 2 samples a device, and the shapes of its batch."""
    sizes = gpt2.Config(
        hidden_size=EMBED,
        num_hidden_layers=DEPTH,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQ,
        vocab_chunk=VOCABULARY // CHUNKS,
        tie_word_embeddings=tied,
    )
    config = stacks.config_of(stage, accumulation=accumulation, micro=2)
    samples = len(devices) * 2 * accumulation
    batch = {"tokens": jax.ShapeDtypeStruct((samples, SEQ + 1), jnp.int32)}
    program = build_program(
        config, lambda rngs: gpt2.build(sizes, rngs), gpt2.loss, devices=devices
    )
    return program, batch


def lookup_program(devices: Sequence[jax.Device], rows: int, micro: int) -> tuple[Program, Any]:
    """Rows of a table through one layer, at stage 3."""
    batch = {"ids": jax.ShapeDtypeStruct((len(devices) * micro, SEQ), jnp.int32)}
    program = build_program(
        stacks.config_of(3, micro=micro),
        lambda rngs: stacks.LookedUp(rows, WIDTH, rngs),
        stacks.mean_square,
        devices=devices,
    )
    return program, batch


_COMPILED: dict[tuple[str, str], jax.stages.Compiled] = {}


def _compiled(program: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiled once, however many tests of this process ask for the same program."""
    key = (str(program.devices), lowered.as_text())
    if key not in _COMPILED:
        _COMPILED[key] = lowered.compile()
    return _COMPILED[key]


def compile_step(program: Program, batch: Any) -> jax.stages.Compiled:
    lowered = program.step.lower(program.state, program.abstract_batch(batch))
    return _compiled(program, lowered)


def compile_gradients(program: Program, batch: Any) -> jax.stages.Compiled:
    """The gradients alone, with nobody to say where they should go."""

    def gradients(sources: Any, batch: Any) -> Any:
        zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
        return program.gradients(sources, {}, batch, zero, one)[0].grads

    sources = program.state.sources(program.table)
    lowered = jax.jit(gradients).lower(sources, program.abstract_batch(batch))
    return _compiled(program, lowered)


def measure(
    program: Program,
    batch: Any,
    compiling: Callable[[Program, Any], jax.stages.Compiled] = compile_step,
) -> dict[str, Any]:
    """Collectives, the accumulation loop's carry, bytes: what JSON can hold."""
    compiled = compiling(program, batch)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    return {
        "collectives": [asdict(c) for c in collectives(text, program.mesh)],
        "carry": loop_carry_shapes(text),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "largest": [asdict(b) for b in largest_buffers(text, 40)],
        "owners_flops": cost(text, OWNERS).flops,
        "decompositions": decompositions(text),
    }


def decompositions(text: str) -> dict[str, int]:
    """{"qr" or "eigh": how often a step runs it}, with the trips of loops, of GPU programs."""
    counts = {"qr": 0, "eigh": 0}
    for site in walk(parse(text)):
        for name, target in (("qr", "geqrf"), ("eigh", "syev")):
            if site.instruction.opcode == "custom-call" and target in site.instruction.attributes:
                counts[name] += site.runs
    return counts


@dataclass(frozen=True)
class MeasureJob:
    """The job of a process that answers what a step for absent GPUs compiles to."""

    target: Target

    def __call__(self) -> Callable[[bytes], dict[str, Any]]:
        devices = child.devices_of(self.target)

        def compiling(program: Program, batch: Any) -> Any:
            traced = program.step.trace(program.state, program.abstract_batch(batch))
            lowered = traced.lower(lowering_platforms=("cuda",))
            return deviceless_cuda.compile_lowered(lowered, self.target)

        def answer(job: bytes) -> dict[str, Any]:
            with gpu.assumed(self.target.chip.capability):
                return measure(*pickle.loads(job)(devices), compiling)

        return answer


def measure_on_gpus(target: Target, job: Callable[[Any], tuple[Program, Any]]) -> dict[str, Any]:
    """`measure` of a step for absent GPUs, which `job(devices)` builds in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = in_child._environment(target, folder)
        own = pickle.dumps(MeasureJob(target))
        workers = Workers(own, 1, environment, f"{target}: the compile failed", folder)
        try:
            return workers.submit(in_child.pickled(job)).result(in_child.PATIENCE)
        finally:
            workers.close()


def measure_stacks(
    devices: Sequence[jax.Device], cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """{name: what `stack_program(**case)` compiles to}."""
    return {name: measure(*stack_program(devices, **case)) for name, case in cases.items()}


def collectives_of(found: dict[str, Any]) -> list[Communication]:
    """The collectives of what was measured, back from JSON."""
    return [Communication(**{**c, "axes": tuple(c["axes"])}) for c in found["collectives"]]
