"""Pickles, read without importing or calling anything that they name.

A class or a function is only its name here. The few that torch's and DeepSpeed's files need have a
counterpart in this package; what any other would have constructed becomes `Inert`.
"""

import io
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxspeed.errors import PretrainedError

MOST_BYTES = 128 << 20
_MOST_VALUES, _MOST_CHARACTERS = 64, 1024  # of a call or a record, and of a name
# Instructions that torch's files do not have, and that call, hash, or allocate before they read.
_REFUSED = (
    *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8),
    *(pickle.NEWOBJ_EX, pickle.PUT, pickle.GET),
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.NEXT_BUFFER, pickle.DICT),
)


@contextmanager
def as_pretrained_error(where: object) -> Iterator[None]:
    """Raise a PretrainedError where a file has other values than its format."""
    try:
        yield
    except PretrainedError:
        raise
    except (
        *(pickle.UnpicklingError, EOFError, struct.error, ValueError, TypeError, LookupError),
        *(AttributeError, OverflowError, OSError, zipfile.BadZipFile, NotImplementedError),
    ) as error:
        lacks = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PretrainedError(
            f"{where}: is damaged, or of a version that is not read: {lacks}"
        ) from None


@dataclass(frozen=True)
class Name:
    """A class, a function or a constant, as "module.name"."""

    text: str


@dataclass(frozen=True, eq=False)
class Pickled:
    """The fields of an object of a known class."""

    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Inert:
    """An object that is not read; its use is an error that names it."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"is a {self.name}, which is not read")

    def __iter__(self) -> Any:
        raise TypeError(f"is a {self.name}, which is not read")

    def __getitem__(self, key: Any) -> Any:
        return iter(self)

    def __int__(self) -> int:
        return int(next(iter(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Not read."""

    def extend(self, items: Any) -> None:
        """Not read."""

    append = extend


_Unpickler: Any = pickle._Unpickler  # the one in Python


class PickleReader(_Unpickler):
    """Reads one pickle.

    Args:
      constructors: by the names of what they replace.
      records: the beginnings of the names of classes whose fields are read.
      inert: counts what is not read, by name.
      storage: resolves a reference to what is beside the pickle.
    """

    def __init__(
        self,
        data: bytes,
        constructors: Mapping[str, Callable[..., Any]],
        records: Sequence[str],
        inert: Counter[str],
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._constructors, self._records, self._inert = constructors, tuple(records), inert
        self.persistent_load = storage or _refuse

    def find_class(self, module: str, name: str) -> Name:
        if len(module) + len(name) > _MOST_CHARACTERS:
            raise ValueError("has a class with a name that is too long")
        return Name(f"{module}.{name}")

    def _construct(self) -> None:
        arguments = self.stack.pop()
        what = self.stack.pop()
        if not isinstance(what, Name) or type(arguments) is not tuple:
            raise ValueError("calls what is no class")
        if len(arguments) > _MOST_VALUES:
            raise ValueError(f"calls {what.text} with {len(arguments):,} arguments")
        if what.text in ("copyreg._reconstructor", "copy_reg._reconstructor"):
            what, arguments = arguments[0], ()
        if constructor := self._constructors.get(what.text):
            self.append(constructor(*arguments))
        elif what.text.startswith(self._records):
            self.append(Pickled())
        else:
            self._inert[what.text] += 1
            self.append(Inert(what.text))

    def _set_state(self) -> None:
        """Set the fields of a record; the state of all else, such as `_metadata`, is not read."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Pickled):
            fields = state if type(state) is dict else {"state": state}
            if len(fields) > _MOST_VALUES:
                raise ValueError(f"has a record of {len(fields):,} fields")
            target.fields.update(fields)

    def _set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.stack[-1][hashable(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][hashable(key)] = value

    dispatch: ClassVar[dict[int, Any]] = {
        **_Unpickler.dispatch,
        **{code[0]: lambda self: _refuse() for code in _REFUSED},
        pickle.REDUCE[0]: _construct,
        pickle.NEWOBJ[0]: _construct,
        pickle.BUILD[0]: _set_state,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _refuse(*_: Any) -> Any:
    raise ValueError("has an instruction that torch's files do not have")


def hashable(key: Any) -> Any:
    """A key whose hash and comparison take constant time; no two of many have the same hash."""
    if type(key) is tuple:
        return Inert("tuple")  # no tuple is looked up
    is_short = not isinstance(key, str) or len(key) <= 1 << 16
    is_small = not isinstance(key, int) or abs(key) < 1 << 53
    is_known = isinstance(key, str | int | float | Name | Pickled | Inert | None)
    if not (is_known and is_short and is_small):
        raise ValueError("has a dict with keys that are not read")
    return key
