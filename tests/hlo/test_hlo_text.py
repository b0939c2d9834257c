"""Compiled programs are read completely: shapes, instructions, trip counts."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jaxspeed.hlo.parser import leaves, parse, parse_shape
from jaxspeed.hlo.trip_counts import walk
from tests.hlo.hlo_programs import compiled_text, zero2

NUMPY_NAMES = {
    "pred": np.bool_, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64, "c64": np.complex64,
    "c128": np.complex128, "f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_bytes_of_a_type_are_numpys(name):
    shape = parse_shape(f"{name}[3,5]{{1,0}}")
    assert shape.bytes == 15 * np.dtype(NUMPY_NAMES[name]).itemsize


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("f32[]", 4),
        ("token[]", 0),
        ("s4[3]{0:E(4)}", 2),  # packed, the last byte half full
        ("u2[8]", 2),
        ("f4e2m1fn[6]", 3),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("f32[<=4,2]", 32),
        ("(s32[], (bf16[8]{0}, token[]), f32[2,2]{1,0:T(2,128)})", 4 + 16 + 16),
        ("()", 0),
    ],
)
def test_bytes_of_a_shape(text, total):
    assert sum(array.bytes for array in leaves(parse_shape(text))) == total


def test_host_memory_is_read_from_the_layout():
    assert parse_shape("f32[8]{0:T(128)S(5)}").memory == 5
    assert parse_shape("f32[8]{0}").memory == 0


def test_every_instruction_is_read_as_xla_reads_it(mesh):
    """Against jaxlib's own parser, which gives names, opcodes and operands."""
    hlo = pytest.importorskip("jaxlib._hlo")
    text = zero2(mesh, layers=2, micro_batches=3, width=64)
    ours = {
        name: {i.name: (i.opcode, list(i.operands)) for i in computation.instructions.values()}
        for name, computation in parse(text).computations.items()
    }
    theirs = {
        computation.name: {
            i.name: (kebab(i.opcode.name), [operand.name for operand in i.operands()])
            for i in computation.instructions()
        }
        for computation in hlo.hlo_module_from_text(text).computations()
    }
    assert ours == theirs


def kebab(opcode):
    """`kGetTupleElement` -> `get-tuple-element`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", opcode.removeprefix("k")).lower()


def test_an_instruction_may_go_on_over_lines():
    """As those around a Pallas kernel do: its metadata holds line breaks."""
    module = parse(
        "HloModule m, num_partitions=4\n\n"
        "ENTRY %e (x: f32[8]) -> f32[8] {\n"
        "  %x = f32[8]{0} parameter(0)\n"
        "  %k = (f32[8]{0}, /*index=1*/u32[]) custom-call(%x), frontend_attributes={kernel={\n"
        '"meta":"{\\"block\\": 128}"\n'
        '}}, metadata={op_name="jit(f)/kernel"}\n'
        "  ROOT %r = f32[8]{0} get-tuple-element(%k), index=0\n"
        "}\n"
    )
    kernel = module.entry.instructions["k"]
    assert (kernel.op_name, kernel.operands) == ("jit(f)/kernel", ("x",))
    assert module.entry.root.name == "r"
    assert module.devices == 4


def test_what_runs_before_an_instruction_is_not_called_by_it():
    """As XLA:GPU orders what moves to host memory."""
    module = parse(
        "HloModule m\n\n"
        "%inner (p: f32[]) -> f32[] {\n"
        "  ROOT %p = f32[] parameter(0)\n"
        "}\n\n"
        "ENTRY %main (x: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n"
        "  %first = f32[] negate(%x)\n"
        "  ROOT %made = f32[] fusion(%x), kind=kLoop, calls=%inner, control-predecessors={%first}\n"
        "}\n"
    )
    assert module.entry.instructions["made"].called("calls") == ("inner",)
    assert len([*walk(module)]) == 4


def test_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule m\n")


def runs_of(text, op_name):
    """How often the instructions run whose op_name ends so."""
    return {site.runs for site in walk(parse(text)) if site.instruction.op_name.endswith(op_name)}


def both(text):
    """The text as it is, and without XLA's annotation of trip counts, as on TPU."""
    assert "known_trip_count" in text
    return text, re.sub(r'"known_trip_count":\{[^}]*\}', '"x":0', text)


def test_trip_counts_of_nested_scans_are_multiplied():
    def inner(x):
        return lax.scan(lambda h, _: (jnp.sin(h) * 1.1, None), x, None, length=5)[0]

    def outer(x):
        return lax.scan(lambda h, _: (jnp.cos(inner(h)), None), x, None, length=7)[0]

    for text in both(compiled_text(outer, jnp.ones((512, 512)))):
        assert runs_of(text, "/sin") == {35}
        assert runs_of(text, "/cos") == {7}


def test_a_loop_that_starts_later_turns_less_often():
    def f(x):
        return lax.fori_loop(3, 11, lambda i, h: jnp.sin(h) + i, x)

    for text in both(compiled_text(f, jnp.ones((512, 512)))):
        assert runs_of(text, "/sin") == {8}


def loop(compare, start, step, bound, carried=False):
    """`for (i = start; i COMPARE bound; i += step)` in HLO."""
    limit = (
        "%n = s32[] get-tuple-element(%q), index=1" if carried else f"%n = s32[] constant({bound})"
    )
    return (
        "HloModule m\n\n"
        "%body (p: (s32[], s32[])) -> (s32[], s32[]) {\n"
        "  %p = (s32[], s32[]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n"
        f"  %s = s32[] constant({step})\n"
        '  %next = s32[] add(%i, %s), metadata={op_name="next"}\n'
        "  %m = s32[] get-tuple-element(%p), index=1\n"
        "  ROOT %t = (s32[], s32[]) tuple(%next, %m)\n"
        "}\n\n"
        "%condition (q: (s32[], s32[])) -> pred[] {\n"
        "  %q = (s32[], s32[]) parameter(0)\n"
        "  %j = s32[] get-tuple-element(%q), index=0\n"
        f"  {limit}\n"
        f"  ROOT %c = pred[] compare({compare[0]}), direction={compare[1]}\n"
        "}\n\n"
        "ENTRY %e () -> (s32[], s32[]) {\n"
        f"  %a = s32[] constant({start})\n"
        f"  %b = s32[] constant({bound})\n"
        "  %t0 = (s32[], s32[]) tuple(%a, %b)\n"
        "  ROOT %w = (s32[], s32[]) while(%t0), condition=%condition, body=%body\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("compare", "start", "step", "bound", "indices"),
    [
        (("%j, %n", "LT"), 0, 1, 6, range(6)),
        (("%j, %n", "LT"), 1, 3, 9, range(1, 9, 3)),
        (("%j, %n", "LE"), 0, 2, 6, range(0, 7, 2)),
        (("%j, %n", "GT"), 7, -2, 0, range(7, 0, -2)),
        (("%j, %n", "GE"), 7, -1, 0, range(7, -1, -1)),
        (("%n, %j", "GT"), 0, 1, 6, range(6)),
        (("%j, %n", "LT"), 9, 1, 6, range(9, 6)),
    ],
)
@pytest.mark.parametrize("carried", [False, True])
def test_trip_count_is_that_of_pythons_range(compare, start, step, bound, indices, carried):
    text = loop(compare, start, step, bound, carried)
    assert runs_of(text, "next") == {len(indices)}


def test_a_loop_that_runs_away_has_no_trip_count():
    (site,) = [
        site
        for site in walk(parse(loop(("%j, %n", "LT"), 0, -1, 6)))
        if site.instruction.op_name == "next"
    ]
    assert site.loops[0].trips is None


def test_xlas_annotation_is_believed_where_it_is_given():
    text = loop(("%j, %n", "LT"), 0, -1, 6).replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"17"}}'
    )
    assert runs_of(text, "next") == {17}
