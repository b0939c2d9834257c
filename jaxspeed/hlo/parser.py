"""Parser of compiled HLO text: computations, instructions, shapes, attributes.

The compiled program is only available as text (`compiled.as_text()`); jaxlib's HLO classes give
neither shapes nor attributes. Reads the text of XLA:CPU, XLA:TPU and XLA:GPU; `trip_counts.py`
walks it.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\)\s*->\s.*\{$")
_FOOTER = re.compile(r'^\}(, execution_thread="[^"]*")?$')
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (.*)$", re.DOTALL)
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array (or token) on one device."""

    dtype: str
    dims: tuple[int, ...]
    memory: int = 0  # XLA's memory space: 0 device memory, 1 TPU's VMEM, 5 host

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without tile padding; sub-byte types are packed."""
        return -(-self.elements * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Tree = Shape | tuple["Tree", ...]


@dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(operands), attributes`."""

    name: str
    shape: Tree
    opcode: str
    operands: tuple[str, ...]
    arguments: str  # the text between the parentheses: a constant's value, a parameter's number
    attributes: str

    def attribute(self, key: str) -> str | None:
        """The text of `key=...` up to the comma that ends it, or None."""
        match = re.search(rf"(?:^|[ ,]){key}=", self.attributes)
        return None if match is None else _value(self.attributes, match.end())

    @property
    def op_name(self) -> str:
        """The path of JAX's named scopes, or ''."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1) if match else ""

    def called(self, key: str) -> tuple[str, ...]:
        """The computations that the attribute `key` names."""
        value = self.attribute(key)
        return () if value is None else tuple(_CALLED.findall(value))

    @property
    def arrays(self) -> tuple[Shape, ...]:
        """The arrays of the result, with tuples flattened."""
        return tuple(leaves(self.shape))

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


@dataclass(frozen=True)
class Computation:
    """A function: its instructions in order, and its result `root`."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.arguments): i for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each one."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users


@dataclass(frozen=True)
class Module:
    """A compiled program for one of `devices` devices."""

    computations: dict[str, Computation]
    entry: Computation
    devices: int


def bits(dtype: str) -> int:
    """Bits of one element: the first number in the type's name (`bf16`, `f8e4m3fn`, `s4`)."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.search(r"\d+", dtype)
    if match is None:
        raise ValueError(f"HLO type {dtype!r} is unknown")
    return int(match.group())


def leaves(shape: Tree) -> Iterator[Shape]:
    """The arrays of a possibly nested tuple."""
    if isinstance(shape, Shape):
        yield shape
        return
    for part in shape:
        yield from leaves(part)


def parse_shape(text: str) -> Tree:
    """Parse `f32[2,3]{1,0}`, `pred[]`, `(s32[], (bf16[8], token[]))`."""
    text = text.strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in _split(text[1:-1]))
    match = _ARRAY.match(text)
    if match is None:
        raise ValueError(f"not an HLO shape: {text!r}")
    dtype, dims, layout = match.groups()
    memory = re.search(r"S\((\d+)\)", layout or "")
    sizes = tuple(int(d.strip().lstrip("<=")) for d in dims.split(",") if d.strip())
    return Shape(dtype, sizes, int(memory.group(1)) if memory else 0)


def parse(text: str | Module) -> Module:
    """Parse the text of a compiled module, or return one that is parsed."""
    if isinstance(text, Module):
        return text
    header = text.split("\n", 1)[0]
    devices = 1
    for key in ("num_partitions", "replica_count"):
        if match := re.search(rf"\b{key}=(\d+)", header):
            devices *= int(match.group(1))
    computations: dict[str, Computation] = {}
    entry = None
    for name, is_entry, lines in _blocks(text):
        instructions, root = {}, None
        for line in lines:
            instruction, is_root = _parse_instruction(line)
            instructions[instruction.name] = instruction
            root = instruction if is_root or root is None else root
        if root is None:
            raise ValueError(f"HLO computation {name} has no instruction")
        computations[name] = Computation(name, instructions, root)
        entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError("this is not the text of a compiled HLO module: it has no ENTRY")
    return Module(computations, entry, devices)


def _blocks(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Each computation's name, whether it is the entry, and one string per instruction.

    A Pallas kernel's metadata contains line breaks, so a line that starts no instruction continues
    the previous one.
    """
    name, is_entry = None, False
    lines: list[str] = []
    for line in text.splitlines():
        if name is None:
            if match := _HEADER.match(line):
                name, is_entry, lines = match.group(2), match.group(1) is not None, []
        elif _FOOTER.match(line):
            yield name, is_entry, lines
            name = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += "\n" + line


def _parse_instruction(line: str) -> tuple[Instruction, bool]:
    match = _INSTRUCTION.match(line)
    assert match is not None
    root, name, rest = match.groups()
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape = parse_shape(_COMMENT.sub("", rest[:end]))
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    opcode = rest[end:opening].strip()
    arguments = _COMMENT.sub("", rest[opening + 1 : closing])
    # The operands of a constant (its value) and a parameter (its number) are not instructions.
    operands = () if opcode in ("constant", "parameter") else tuple(_CALLED.findall(arguments))
    attributes = rest[closing + 1 :].lstrip(", ")
    return Instruction(name, shape, opcode, operands, arguments, attributes), root is not None


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if depth == 0:
                return at
    raise ValueError(f"unbalanced parentheses in HLO: {text[:80]!r}")


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in [*parts, text[start:]] if part.strip()]


def _value(text: str, start: int) -> str:
    """The value that begins at `start`: up to the next `, key=` outside of brackets."""
    depth, quoted, at = 0, False, start
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0 and re.match(r", [a-z_-]+=(?!\()", text[at:]):
            # `mesh['a'=4], device_ids=(0,2,1,3) {'a'}` is one value: its comma does not match.
            return text[start:at]
        at += 1
    return text[start:]
