"""Pickles, read without importing or calling anything that they name.

A pickle is a program for a stack machine, and Python's own reader imports and calls what it says.
This one interprets the instructions: a class or a function is only its name, and the few
constructors that torch's and DeepSpeed's files need are replaced by functions of this package. What
any other would have constructed becomes `Inert`.
"""

import pickletools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 256 << 20
_MOST_STEPS, _MOST_MARKS = 50_000_000, 1000
_FLAT = (str, int, float, bytes, type(None))
_VALUES = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"}
    | {"BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip


class PickleError(ValueError):
    """A pickle is damaged, or of a kind that is not read."""


@dataclass(frozen=True)
class Name:
    """A class, a function or a constant that a pickle names, as "module.name"."""

    text: str


@dataclass(frozen=True, eq=False)
class Inert:
    """What stands for an object that is not read; its use is an error that names it."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"is a {self.name}, which is not read")

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(f"is a {self.name}, which is not read")


@dataclass(frozen=True, eq=False)
class Record:
    """The fields of an object of a known class."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)


@dataclass
class PickleReader:
    """Reads pickles.

    Args:
      constructors: by the names of what they replace; each is called with the pickled arguments.
      records: the classes whose fields are read, by name; one that ends in "." names a module.
      persistent: resolves the references of a pickle to what is stored beside it.

    Attributes:
      inert: how often each class or function was named that is not read.
    """

    constructors: Mapping[str, Callable[..., Any]]
    records: Collection[str] = ()
    persistent: Callable[[Any], Any] | None = None
    inert: Counter[str] = field(default_factory=Counter)

    def read(self, data: bytes) -> Any:
        """The object of a pickle.

        Raises:
          PickleError: it is damaged, too large, or has other instructions than those that torch's
            files need.
        """
        if len(data) > MOST_BYTES:
            raise PickleError(
                f"has {len(data):,} bytes, more than the {MOST_BYTES:,} that are read"
            )
        try:
            return self._run(data)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise PickleError(str(error) or type(error).__name__) from None

    def _run(self, data: bytes) -> Any:
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}
        argument: Any
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            name: str = opcode.name
            if number > _MOST_STEPS:
                raise PickleError(f"has more than {_MOST_STEPS:,} instructions")
            if name in _VALUES:
                stack.append(argument)
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[argument])
            elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name == "MARK":
                if len(marks) == _MOST_MARKS:
                    raise PickleError(f"is nested more than {_MOST_MARKS} deep")
                marks.append(stack)
                stack = []
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name in ("TUPLE", "LIST", "DICT", "FROZENSET", "APPENDS", "SETITEMS", "ADDITEMS"):
                items, stack = stack, marks.pop()
                if name == "TUPLE":
                    stack.append(tuple(items))
                elif name in ("LIST", "FROZENSET"):
                    stack.append(items)
                elif name == "DICT":
                    stack.append(_with_items({}, items))
                elif name == "SETITEMS":
                    _with_items(stack[-1], items)
                else:
                    _extend(stack[-1], items)
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                count = int(name[-1])
                stack[-count:] = [tuple(_popped(stack, count))]
            elif name == "APPEND":
                (item,) = _pop(stack, 1)
                _extend(stack[-1], [item])
            elif name == "SETITEM":
                pair = _pop(stack, 2)
                _with_items(stack[-1], pair)
            elif name == "GLOBAL":
                stack.append(Name(argument.replace(" ", ".", 1)))
            elif name == "STACK_GLOBAL":
                module, attribute = _pop(stack, 2)
                if not isinstance(module, str) or not isinstance(attribute, str):
                    raise PickleError("names a class by what is no text")
                stack.append(Name(f"{module}.{attribute}"))
            elif name in ("REDUCE", "NEWOBJ"):
                stack.append(self._constructed(*_pop(stack, 2)))
            elif name == "NEWOBJ_EX":
                stack.append(self._constructed(*_pop(stack, 3)[:2]))
            elif name == "BUILD":
                (state,) = _pop(stack, 1)
                _set_state(stack[-1], state)
            elif name == "BINPERSID" and self.persistent is not None:
                stack.append(self.persistent(*_pop(stack, 1)))
            elif name == "DUP":
                stack.append(stack[-1])
            elif name == "POP_MARK" or (name == "POP" and not stack):
                stack = marks.pop()
            elif name == "POP":
                stack.pop()
            elif name == "STOP":
                return stack[-1]
            elif name not in ("PROTO", "FRAME"):
                raise PickleError(f"has the instruction {name}, which torch's files do not have")
        raise PickleError("has no end")

    def _constructed(self, what: Any, arguments: Any) -> Any:
        if not isinstance(what, Name) or type(arguments) is not tuple:
            raise PickleError("calls what is no class")
        if what.text in ("copyreg._reconstructor", "copy_reg._reconstructor"):
            return self._constructed(arguments[0], ())
        if constructor := self.constructors.get(what.text):
            return constructor(*arguments)
        module = f"{what.text.rpartition('.')[0]}."
        if what.text in self.records or module in self.records:
            return Record(what.text)
        self.inert[what.text] += 1
        return Inert(what.text)


def _popped(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise PickleError("takes from an empty stack")
    return stack[-count:]


def _pop(stack: list[Any], count: int) -> list[Any]:
    items = _popped(stack, count)
    del stack[-count:]
    return items


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target += items
    elif not isinstance(target, Inert):
        raise PickleError("adds to what is no list")


def _with_items(target: Any, items: list[Any]) -> Any:
    """A dict with these keys and values, one after the other; not those of an inert object."""
    if len(items) % 2:
        raise PickleError("has a key without a value")
    if type(target) is dict:
        for key, value in zip(items[::2], items[1::2]):
            target[hashable(key)] = value
    elif not isinstance(target, Inert):
        raise PickleError("sets an item of what is no dict")
    return target


def hashable(key: Any) -> Any:
    """A key whose hash and comparison take constant time and no recursion."""
    parts = key if type(key) is tuple else (key,)
    if len(parts) > 64 or not all(isinstance(x, (*_FLAT, Name, Record, Inert)) for x in parts):
        raise PickleError("has a dict with keys that are not read")
    return key


def _set_state(target: Any, state: Any) -> None:
    """The fields of a known object; the state of all others, such as `_metadata`, is not read."""
    if not isinstance(target, Record):
        return
    parts = state if type(state) is tuple and len(state) == 2 else (state, None)
    if all(part is None or type(part) is dict for part in parts):
        for part in filter(None, parts):
            target.fields.update({key: x for key, x in part.items() if type(key) is str})
    else:
        target.fields["state"] = state
