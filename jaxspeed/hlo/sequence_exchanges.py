"""What XLA exchanges over the sequence axis besides attention: the cost of what mixes positions.

The program is in the global view, and XLA communicates for operations along a sharded sequence: a
scan over time gathers its inputs. Here that is read from the compiled program, with the operation
and the user's line. What jaxspeed exchanges itself is left out, such as the positions of
neighbours that a convolution reads.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from jax.sharding import AbstractMesh, Mesh

from jaxspeed.axes import SEQ
from jaxspeed.errors import LIBRARIES
from jaxspeed.hlo.collectives import collectives_by_site
from jaxspeed.hlo.parser import Computation, Instruction, parse
from jaxspeed.jaxpr.primitives import TOKEN_ORDER
from jaxspeed.ops.attention_call import SEQUENCE_SCOPE
from jaxspeed.placement.show import scaled_text
from jaxspeed.tensor_parallel.windows import WINDOWS_SCOPE
from jaxspeed.zero3 import table_lookup

_VERBS = {
    "all-gather": "gathers",
    "all-to-all": "exchanges",
    "collective-permute": "sends",
    "all-reduce": "reduces",
}
_OPERATIONS = {"while": "a scan", "cumsum": "a cumulative sum"}
# The named scopes of what is not XLA's choice.
_OURS = (SEQUENCE_SCOPE, TOKEN_ORDER, WINDOWS_SCOPE, table_lookup.SCOPE)
_FLOATS = ("f", "bf", "c")  # ids and positions are 4 bytes a token


@dataclass(frozen=True)
class SequenceExchange:
    """A collective over the sequence axis that is not attention's, of the equal ones the sum."""

    operation: str
    line: str  # of the user; "" if unknown
    kind: str
    bytes: int  # of one run
    runs: int

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        times = f", {self.runs} times a step" if self.runs > 1 else " a step"
        return f"{self.operation}{at} {_VERBS[self.kind]} {scaled_text(self.bytes, 'B')}{times}"


def sequence_exchanges(
    text: str, mesh: Mesh | AbstractMesh, parameters: Collection[int]
) -> tuple[SequenceExchange, ...]:
    """The exchanges of a compiled program, those of most bytes first.

    `parameters` are the elements of the parameters and of their layers: arrays of these sizes are
    gathered by ZeRO. Sums over the sequence are those of gradients, and cost as over data.
    """
    if mesh.shape.get(SEQ, 1) == 1:
        return ()
    lines = SourceLines(text)
    exchanges: dict[tuple[str, str, str, int], SequenceExchange] = {}
    for site, collective in collectives_by_site(parse(text), mesh):
        ours = any(scope in collective.site for scope in _OURS) or collective.elements in parameters
        if (
            SEQ not in collective.axes
            or collective.kind not in _VERBS
            or collective.kind == "all-reduce"
            or ours
        ):
            continue
        if not collective.dtype.startswith(_FLOATS):
            continue
        operation, line = lines.of(site.computation, site.instruction)
        key = operation, line, collective.kind, collective.bytes
        runs = collective.runs + (exchanges[key].runs if key in exchanges else 0)
        exchanges[key] = SequenceExchange(operation, line, collective.kind, collective.bytes, runs)
    return tuple(sorted(exchanges.values(), key=lambda exchange: -exchange.bytes * exchange.runs))


class SourceLines:
    """The lines of the user's that made the instructions of a compiled program."""

    def __init__(self, text: str) -> None:
        self._text = text

    def of(self, computation: Computation, instruction: Instruction) -> tuple[str, str]:
        """(operation, file:line) of an instruction, or of the first one that reads it.

        A resharding has the metadata of the array that it reshards, or none.
        """
        seen, waiting = {instruction.name}, [instruction]
        while waiting:
            read = waiting.pop(0)
            if read.op_name and not read.op_name.endswith("sharding_constraint"):
                name = re.sub(r"[^/]*\(|\)", "", read.op_name.rpartition("/")[2])
                return _OPERATIONS.get(name, name), self._line(read)
            new = [user for user in computation.users[read.name] if user.name not in seen]
            seen.update(user.name for user in new)
            waiting += new
        return instruction.opcode, self._line(instruction)

    def _line(self, instruction: Instruction) -> str:
        """The user's innermost line of an instruction's stack."""
        if match := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes):
            return f"{match[1].rpartition('/')[2]}:{match[2]}"
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        stack = list(self._stack(int(match[1]))) if match else []
        user_lines = [
            (file, line) for file, line in stack if not file.startswith(LIBRARIES)
        ] or stack
        return f"{user_lines[0][0].rpartition('/')[2]}:{user_lines[0][1]}" if user_lines else ""

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        """(file, line), innermost first."""
        files, locations, frames = self._tables
        while frame in frames:
            location, parent = frames[frame]
            file, line = locations[location]
            yield files[file], line
            if parent == frame:
                return
            frame = parent

    @cached_property
    def _tables(
        self,
    ) -> tuple[dict[int, str], dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
        """The files, the locations and the frames of a module's header, by number."""
        files = {int(n): name for n, name in re.findall(r'(?m)^(\d+) "(.*)"$', self._of("FileN"))}
        pattern = r"(?m)^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
        locations = {
            int(n): (int(file), int(line))
            for n, file, line in re.findall(pattern, self._of("FileLocations"))
        }
        pattern = r"(?m)^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        frames = {
            int(n): (int(at), int(parent or n))
            for n, at, parent in re.findall(pattern, self._of("StackFrames"))
        }
        return files, locations, frames

    def _of(self, section: str) -> str:
        match = re.search(rf"(?m)^{section}\w*\n((?:\d+ .*\n)*)", self._text)
        return match[1] if match else ""
