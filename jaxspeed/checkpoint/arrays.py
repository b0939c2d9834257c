"""Arrays on disk, by Orbax: each process writes its shards, each device reads its own."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity

from jaxspeed.checkpoint.leaves import KeptLeaf

FOLDER = "arrays"
_CHUNK_BYTES = 32 << 20  # what is read at once where the cut is another, and by an export


class ArrayFiles:
    """Writes in the background, one checkpoint at a time.

    Orbax marks the end of its part by a file of its own, which needs no rename: the checkpoint
    around it has its manifest for that.
    """

    def __init__(self) -> None:
        self._orbax = ocp.AsyncCheckpointer(
            _handler(), temporary_path_class=atomicity.CommitFileTemporaryPath
        )

    def write(self, folder: Any, arrays: Mapping[str, jax.Array]) -> None:
        """Begins to write; the arrays may be used up once this returns, where they are on devices
        whose memory is not the host's."""
        full = {name: x for name, x in arrays.items() if math.prod(x.shape)}
        chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in full}
        self._orbax.save(folder / FOLDER, args=ocp.args.PyTreeSave(full, save_args=chunks))

    def wait(self) -> None:
        """Until all is written; raises what went wrong."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        self._orbax.close()


def read_arrays(folder: Any, wanted: Mapping[str, KeptLeaf]) -> dict[str, jax.Array]:
    """Arrays by name in shape, dtype and sharding as wanted: cut or padded with zeros behind."""
    full = {name: leaf.stored for name, leaf in wanted.items() if math.prod(leaf.stored.shape)}
    how = {
        name: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=tuple(x.shape), dtype=x.dtype, strict=False
        )
        for name, x in full.items()
    }
    with ocp.Checkpointer(_handler()) as orbax:
        asked = ocp.args.PyTreeRestore(
            dict.fromkeys(full, 0), restore_args=how, partial_restore=True
        )
        return orbax.restore(folder / FOLDER, args=asked) if full else {}


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Trained weights hardly shrink, and compressing them would take the step's cores.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
