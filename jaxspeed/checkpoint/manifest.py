"""The manifest of a checkpoint: size and checksum of each file, written last to commit it.

The manifest's layout (`format`, `tag`, `files`, `crc32`) never changes, so that any version can
read the format of the rest from it.
"""

import contextlib
import heapq
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from jaxspeed.checkpoint.object_storage import is_local, sizes_in_bucket
from jaxspeed.errors import CheckpointError

NAME = "manifest.json"
MARK = ".jaxspeed"  # of a folder that is being written or removed; in no manifest
FORMAT = 1  # of everything in a checkpoint
_BLOCK = 4 << 20

Sums = dict[str, tuple[int, int]]  # {file: (bytes, crc32)}


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete checkpoint."""

    format: int
    tag: str
    files: Sums

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def sizes_of(folder: epath.Path) -> dict[str, int]:
    """Bytes of the files and symlinks in a folder by relative path, without the manifest."""
    if not is_local(folder):
        sizes = sizes_in_bucket(folder)
        sizes.pop(NAME, None)
        return sizes
    sizes = {}

    def walk(at: epath.Path, prefix: str) -> None:
        for entry in at.iterdir():
            if entry.is_dir() and not os.path.islink(entry):
                walk(entry, f"{prefix}{entry.name}/")
            elif f"{prefix}{entry.name}" not in (NAME, MARK):
                with contextlib.suppress(OSError):
                    sizes[prefix + entry.name] = os.stat(entry).st_size

    walk(folder, "")
    return sizes


def shares_of(sizes: Mapping[str, int], processes: int) -> list[list[str]]:
    """The files that each process checks, balanced by bytes."""
    shares: list[list[str]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, least = heapq.heappop(loads)
        shares[least].append(name)
        heapq.heappush(loads, (load + sizes[name], least))
    return shares


def checksums(folder: epath.Path, names: Iterable[str]) -> Sums:
    return {name: _sum(folder / name) for name in names}


def problems_of(folder: epath.Path, files: Sums) -> list[str]:
    """Problems of these files of a checkpoint: missing, elsewhere, of another size or checksum."""
    problems, inside = [], f"{os.path.realpath(folder)}{os.sep}"
    for name, (size, crc) in files.items():
        if is_local(folder) and not os.path.realpath(folder / name).startswith(inside):
            problems.append(f"{name} is a link out of the checkpoint")
            continue
        try:
            actual = _sum(folder / name)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            problems.append(f"{name} is missing" if missing else f"{name} cannot be read: {error}")
            continue
        if actual[0] != size:
            problems.append(f"{name} has {actual[0]:,} bytes, not {size:,}")
        elif actual[1] != crc:
            problems.append(f"{name} was modified: its checksum differs")
    return problems


def unlisted(folder: epath.Path, files: Sums, header: str) -> list[str]:
    """Problems of a checkpoint whose header or another file that may be read is not in `files`.

    Files of the top level that a user has added are not read.
    """
    there = {header, *(name for name in sizes_of(folder) if "/" in name or name == header)}
    return [f"{name} is not in {NAME}" for name in sorted(there - files.keys())]


def write_manifest(folder: epath.Path, tag: str, files: Sums) -> None:
    body = {"format": FORMAT, "tag": tag, "files": {k: list(v) for k, v in sorted(files.items())}}
    write_file(folder / NAME, json.dumps({**body, "crc32": _crc_of(body)}, indent=1).encode())


def read_manifest(folder: epath.Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
      CheckpointError: it is missing, damaged or of another checkpoint.
    """
    try:
        body = json.loads((folder / NAME).read_text())
        crc = body.pop("crc32")
        if crc != _crc_of(body):
            raise CheckpointError(f"{NAME} was modified: its checksum differs")
        files = {name: (int(size), int(crc)) for name, (size, crc) in body["files"].items()}
        if any(part in ("", ".", "..") for name in files for part in name.split("/")):
            raise ValueError("a path out of the folder")
        manifest = Manifest(body["format"], body["tag"], files)
    except FileNotFoundError:
        raise CheckpointError(f"{NAME} is missing: the save was not completed") from None
    except OSError as error:
        raise CheckpointError(f"{NAME} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"{NAME} is damaged") from None
    if manifest.tag != folder.name:
        raise CheckpointError(f"{NAME} belongs to {manifest.tag!r}")
    return manifest


def write_file(path: epath.Path, content: bytes) -> None:
    """Write a small file and sync it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        if is_local(path):
            os.fsync(file.fileno())


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _sum(path: epath.Path) -> tuple[int, int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc
