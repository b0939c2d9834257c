"""Weights of a folder, read block by block into the shards of a model's parameters."""

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspeed.config import Config
from jaxspeed.config.run_sections import Data
from jaxspeed.data.chat_template import special_tokens
from jaxspeed.data.tokenizer import FILES, Tokenizer, read_tokenizer, tokenizer_file
from jaxspeed.errors import ConfigError, DataError, PretrainedError
from jaxspeed.interop.hf_folder import PretrainedFolder
from jaxspeed.interop.mapping import Bound, Index, MappingTable, bind, check_tensors
from jaxspeed.placement.codec import Codec
from jaxspeed.quantization.codecs import MatrixCodec
from jaxspeed.user_models.pretrained_model import Origin, Pretrained

log = logging.getLogger("jaxspeed")


class FolderWeights:
    """The tensors of a folder as a model's parameters, by a mapping table.

    Args:
      initialized: paths of parameters that the folder lacks.
    """

    def __init__(
        self, folder: PretrainedFolder, table: MappingTable, initialized: Collection[str] = ()
    ) -> None:
        self.folder = folder
        self.table = table
        self.variables = table.variables
        self.initialized = initialized
        self._bound: Bound | None = None
        self._names: dict[str, str] = {}

    def check(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        tensors, where = self.folder.tensors, str(self.folder.path)
        parameters = {p: shape for p, shape in parameters.items() if p not in self.initialized}
        try:
            self._bound = bind(self.table, parameters, len(tensors))
        except PretrainedError as error:
            raise PretrainedError(f"{where}: {error}") from None
        there = {name: tensor.shape for name, tensor in tensors.items()}
        self._names = check_tensors(self._bound, there, where)
        for name in self._names.values():
            if not jnp.issubdtype(tensors[name].dtype, jnp.inexact):
                raise PretrainedError(f"{where}: {name} has dtype {tensors[name].dtype}")
        _ = self.origin

    @cached_property
    def origin(self) -> Origin:
        """The folder as it was when this was first asked for: in `check`, before values are."""
        return Origin(str(self.folder.path.absolute()), self.folder.digests())

    def dtype_of(self, path: str) -> str:
        """The dtype that has all values of the tensors of a parameter."""
        assert self._bound is not None, "checked first"
        names = {self._names[piece.tensor] for piece in self._bound.pieces[path]}
        return jnp.result_type(*(jnp.dtype(self.folder.tensors[name].dtype) for name in names)).name

    def read(self, path: str, index: Index, dtype: Any) -> np.ndarray:
        assert self._bound is not None, "checked first"
        block = np.empty([span.stop - span.start for span in index], dtype)
        for piece in self._bound.pieces[path]:
            if piece.within(index):
                piece.read(self.folder.array(self._names[piece.tensor]), index, block)
        self.folder.release()
        return block

    def encoded(
        self, path: str, layer: int | None, codec: Codec
    ) -> Mapping[str, np.ndarray] | None:
        """The arrays of a codec, where a tensor is quantized in its form and layout."""
        assert self._bound is not None, "checked first"
        if not isinstance(codec, MatrixCodec):
            return None
        pieces = [p for p in self._bound.pieces[path] if layer is None or p.at[0] == layer]
        outs, dims = codec.outputs, codec.inputs + codec.outputs
        if len(pieces) != 1:
            return None
        (piece,) = pieces
        # The file has [out, in], with the dims of both in our order.
        if piece.part is not None or piece.order != (*range(outs, dims), *range(outs)):
            return None
        return self.folder.codes(self._names[piece.tensor], codec, piece.shape)


def pretrained(
    model: Any,
    folder: str | Path | PretrainedFolder,
    table: MappingTable,
    loss: Callable[[Any, Any], Any] | None = None,
    config: Any = None,
) -> Pretrained:
    """A model with the weights of a folder, for `initialize(model=...)`.

    The values are read when the engine is initialized, straight into its shards.

    Args:
      model: a factory of an nnx.Module, a Linen module, or a pair (init, apply).
      folder: with safetensors files, or the id of a model of the hub.
      table: which tensors are which parameters.
      loss: the loss function, if `initialize` gets none.
    """
    opened = folder if isinstance(folder, PretrainedFolder) else PretrainedFolder(folder)
    return Pretrained(model, FolderWeights(opened, table), loss, config)


def data_section(config: Config) -> Data:
    """The config's section `data`, with the tokenizer of a pretrained model unless it sets one.

    Raises:
      PretrainedError: the folder's tokenizer is only in a format that is not read.
    """
    data = config.data
    if config.model is None or config.model.pretrained is None:
        return data
    if "tokenizer" in data.model_fields_set:
        return data
    folder = PretrainedFolder(config.model.pretrained).path
    if tokenizer_file(folder):
        return data.model_copy(update={"tokenizer": str(folder)})
    if (folder / "vocab.json").is_file():
        raise PretrainedError(
            f"{folder}: has vocab.json but no {FILES[0]}; write one with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), or "
            "set data.tokenizer"
        )
    return data


def tokenizer_of(weights: Any) -> Tokenizer | None:
    """The tokenizer of the folder that a model's weights are from, if there is one."""
    if not isinstance(weights, FolderWeights):
        return None
    folder = weights.folder.path
    return read_tokenizer(folder) if tokenizer_file(folder) else None


def ends_of(weights: Any) -> list[int]:
    """The tokens that end a text by the generation_config.json of a model's folder."""
    if not isinstance(weights, FolderWeights):
        return []
    ends = weights.folder.generation_config.get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def refuse_other_tokenizer(tokenizer: Tokenizer | None, weights: Any, what: str) -> None:
    """Raise ConfigError if the folder of a frozen model's weights has another tokenizer."""
    if why := _unlike(tokenizer, tokenizer_of(weights)):
        raise ConfigError(
            f"{what}: {weights.folder.path} has another tokenizer than the model that trains: its "
            f"{why}"
        )


def warn_of_other_tokenizer(config: Config, tokenizer: Tokenizer | None, size: int | None) -> None:
    """Warn if the text of a run is not in the tokens that a pretrained model's weights know.

    `size` is that of the model's vocabulary.
    """
    if tokenizer is None or config.model is None or config.model.pretrained is None:
        return
    folder = PretrainedFolder(config.model.pretrained).path
    if tokenizer_file(folder) is None:
        is_chosen = "tokenizer" in config.data.model_fields_set or tokenizer.name != "bytes"
        if not is_chosen and size != tokenizer.vocab_size:
            log.warning(
                "model.pretrained: %s has no tokenizer, so that text is read as bytes, which its "
                "weights may not know; name theirs as data.tokenizer",
                folder,
            )
    elif why := _unlike(tokenizer, read_tokenizer(folder)):
        log.warning(
            "data.tokenizer: %s is not that of model.pretrained, whose weights know other tokens: "
            "its %s. Without the key, the folder's tokenizer is read",
            tokenizer.name,
            why,
        )


def _unlike(tokenizer: Tokenizer | None, of_folder: Tokenizer | None) -> str:
    """The first token of a folder that another tokenizer spells otherwise; empty if none does."""
    if tokenizer is None or of_folder is None or tokenizer.to_bytes() == of_folder.to_bytes():
        return ""
    sizes = tokenizer.vocab_size, of_folder.vocab_size
    unlike = [i for i in range(min(sizes)) if tokenizer.spell([i]) != of_folder.spell([i])]
    if not unlike and sizes[0] == sizes[1]:
        return ""
    shown = min([*unlike, *(min(sizes),) * (sizes[0] != sizes[1])])
    return f"token {shown} is {of_folder.spell([shown])!r}, not {tokenizer.spell([shown])!r}"


def padding_of(folder: PretrainedFolder) -> int | None:
    """The padding token of a folder, or the end token where it has none."""
    values, tokens = folder.config, dict[str, int]()
    with contextlib.suppress(DataError):  # reported where text is read
        if tokenizer_file(folder.path):
            tokenizer = read_tokenizer(folder.path)
            ids = {n: tokenizer.encode(text) for n, text in special_tokens(tokenizer).items()}
            tokens = {f"{n}_id": int(x[0]) for n, x in ids.items() if len(x) == 1}
    for name in ("pad_token_id", "eos_token_id"):
        in_config = values.get(name)
        first = in_config[0] if isinstance(in_config, list) and in_config else in_config
        for token in (tokens.get(name), first):
            if isinstance(token, int):
                return token
    return None


def check_vocabulary(folder: PretrainedFolder, vocab_size: int) -> None:
    """Raise PretrainedError if the folder's tokenizer has ids that the model lacks."""
    path = tokenizer_file(folder.path)
    if path is None:
        return
    try:
        largest = _largest_id(path)
    except DataError as error:
        raise PretrainedError(str(error)) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PretrainedError(f"{path}: is not a tokenizer.json: {error!r}") from None
    if largest >= vocab_size:
        raise PretrainedError(
            f"{path}: has ids up to {largest:,}, but vocab_size in config.json is {vocab_size:,}"
        )


def _largest_id(path: Path) -> int:
    """The largest id of a tokenizer; a tokenizer.json need not be one that can be loaded."""
    if path.suffix == ".model":
        return read_tokenizer(path).vocab_size - 1
    content = json.loads(path.read_bytes())
    vocab = content["model"]["vocab"]
    ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1]
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    if not all(type(number) is int for number in ids):
        raise ValueError("an id is no integer")
    return max(ids, default=0)
