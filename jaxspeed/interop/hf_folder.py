"""A Hugging Face folder: config.json, and the tensors of its safetensors files."""

import functools
import importlib.util
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.data.tokenizer import BESIDE
from jaxspeed.errors import PretrainedError
from jaxspeed.interop.mapping import lines
from jaxspeed.interop.quantized import Packed, packed_tensors
from jaxspeed.interop.safetensors import Tensor, TensorFile
from jaxspeed.placement.codec import Codec

log = logging.getLogger("jaxspeed")

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# Files of a folder that an export copies: they belong to the tokenizer, or to generation.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
COPIED = ("generation_config.json", *BESIDE, *PROCESSORS)
# Names of a language model's tensors beside other models, and alone: two generations of them.
_LANGUAGE_MODEL = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class PretrainedFolder:
    """A folder of pretrained weights; no code of it is run, and nothing is unpickled."""

    def __init__(self, folder: str | Path) -> None:
        self.path = _local(folder)
        # Of the shards of a tensor, which are read one after another, one dequantizes it.
        self._unpacked: tuple[str, np.ndarray] | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        path = self.path / CONFIG
        values = _read_json(path)
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise PretrainedError(f"{path}: has no model_type, which names the model's family")
        return values

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json, if there is one."""
        path = self.path / "generation_config.json"
        values = _read_json(path) if path.exists() else {}
        return values if isinstance(values, dict) else {}

    @cached_property
    def image_processor(self) -> dict[str, Any] | None:
        """The settings of the processor of images, if there are some."""
        for name in PROCESSORS:
            path = self.path / name
            values = _read_json(path) if path.exists() else None
            if isinstance(values, dict):
                values = values.get("image_processor", values)
                if isinstance(values, dict) and "size" in values:
                    return values
        return None

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        """The file of each tensor."""
        return self._opened()

    def _opened(self) -> dict[str, TensorFile]:
        index = self.path / INDEX
        if index.exists():
            return self._indexed(index)
        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            pickled = [file.name for pattern in _PICKLED for file in self.path.glob(pattern)]
            if pickled:
                raise PretrainedError(
                    f"{self.path}: has weights only as {', '.join(sorted(pickled)[:3])}, which is "
                    "a pickle: reading it could run any code. Convert it where you trust it, with "
                    "transformers: AutoModel.from_pretrained(...).save_pretrained(...) writes "
                    "safetensors"
                )
            raise PretrainedError(f"{self.path}: has no *.safetensors file")
        owners: dict[str, TensorFile] = {}
        for file in map(TensorFile.open, paths):
            for name in file.tensors:
                if name in owners:
                    raise PretrainedError(
                        f"{self.path}: {name} is in {owners[name].path.name} and in "
                        f"{file.path.name}, and there is no {INDEX}"
                    )
                owners[name] = file
        return owners

    def _indexed(self, index: Path) -> dict[str, TensorFile]:
        content = _read_json(index)
        try:
            where = dict(content["weight_map"])
            names = sorted(set(map(str, where.values())))
            files_there = {name for name in names if (self.path / name).is_file()}
        except OSError as error:
            raise PretrainedError(f"{index}: names a file that no folder has: {error}") from None
        except (KeyError, TypeError, ValueError):
            raise PretrainedError(f"{index}: has no weight_map from tensors to files") from None
        if outside := [name for name in names if Path(name).name != name]:
            raise PretrainedError(f"{index}: names {outside[0]!r}, which is not in its folder")
        if absent := [name for name in names if name not in files_there]:
            raise PretrainedError(f"{index}: names files that are absent:{lines(absent)}")
        files = {name: TensorFile.open(self.path / name) for name in names}
        problems = [
            f"{tensor} is not in {name}"
            for tensor, name in where.items()
            if tensor not in files[name].tensors
        ]
        problems += [
            f"{tensor} is in {name} but not in the index"
            for name, file in files.items()
            for tensor in file.tensors
            if where.get(tensor) != name
        ]
        if problems:
            raise PretrainedError(f"{index}: does not fit its files:{lines(problems)}")
        return {tensor: files[name] for tensor, name in where.items()}

    @cached_property
    def _stored(self) -> Mapping[str, Tensor]:
        return {name: file.tensors[name] for name, file in self._files.items()}

    @cached_property
    def _packed(self) -> Mapping[str, Packed]:
        there = (self.path / CONFIG).exists()
        quantization = (self.config.get("quantization_config") if there else None) or {}
        kind = self.config["model_type"] if there else ""
        read = lambda name: self._files[name].array(name)  # noqa: E731
        return packed_tensors(self._stored, quantization, str(self.path), read, kind)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name, of which only headers are read."""
        parts = {part for packed in self._packed.values() for part in packed.parts}
        unpacked = {name: tensor for name, tensor in self._stored.items() if name not in parts}
        return unpacked | {name: packed.tensor for name, packed in self._packed.items()}

    def array(self, name: str) -> np.ndarray:
        """A tensor as a view of its file; a quantized one is dequantized."""
        if (packed := self._packed.get(name)) is None:
            self._unpacked = None
            return self._files[name].array(name)
        if self._unpacked is None or self._unpacked[0] != name:
            self._unpacked = None  # before the next one is made
            parts = (self._files[part].array(part) for part in packed.parts)
            self._unpacked = name, packed.unpack(*parts)
        return self._unpacked[1]

    def codes(
        self, name: str, codec: Codec, shape: tuple[int, ...]
    ) -> dict[str, np.ndarray] | None:
        """The arrays of a codec, if the file has a quantized tensor as it stores it."""
        packed = self._packed.get(name)
        if packed is None or packed.codes is None:
            return None
        return packed.codes.arrays(
            codec, shape, [self._files[part].array(part) for part in packed.parts]
        )

    def digests(self) -> dict[str, str]:
        """A digest of each file of tensors, and of how config.json says that they are quantized."""
        files = (TensorFile.open(path) for path in sorted({f.path for f in self._files.values()}))
        digests = {file.path.name: file.digest() for file in files}
        there = (self.path / CONFIG).exists()
        if quantization := self.config.get("quantization_config") if there else None:
            text = json.dumps(quantization, sort_keys=True)
            digests[CONFIG] = f"quantization_config, crc32 {zlib.crc32(text.encode()):08x}"
        return digests

    def release(self) -> None:
        """Drop what was read from memory."""
        for file in set(self._files.values()):
            file.release()

    def extra_files(self) -> Sequence[Path]:
        """The tokenizer's files and the generation config."""
        return [self.path / name for name in COPIED if (self.path / name).is_file()]


class LanguageModelFolder(PretrainedFolder):
    """The language model of a folder that has models of images, too: the others are not read.

    Its config.json is the outer one's `text_config`.

    Args:
      defaults: the values of fields that `text_config` may lack.
    """

    def __init__(self, folder: PretrainedFolder, defaults: Mapping[str, Any]) -> None:
        super().__init__(folder.path)
        self._outer, self._defaults = folder, defaults

    @cached_property
    def config(self) -> dict[str, Any]:
        """The language model's part of config.json, complete."""
        outer = self._outer.config
        if not isinstance(text := outer.get("text_config"), dict):
            raise PretrainedError(f"{self.path / CONFIG}: has no text_config")
        shared = ("tie_word_embeddings", "quantization_config")
        fields = {name: outer[name] for name in shared if name in outer} | text
        defaults = {n: x for n, x in self._defaults.items() if fields.get(n) is None}
        return fields | defaults

    def _opened(self) -> dict[str, TensorFile]:
        files: dict[TensorFile, dict[str, str]] = {}
        unread = Counter[str]()
        for name, file in super()._opened().items():
            begin = next((old for old in _LANGUAGE_MODEL if name.startswith(old)), None)
            if begin is None:
                unread[".".join(name.split(".")[: 1 + name.startswith("model.")])] += 1
            else:
                local_name = _LANGUAGE_MODEL[begin] + name.removeprefix(begin)
                files.setdefault(file, {})[name] = local_name
        log.warning(
            "%s: the language model alone is read, and these tensors are not: %s",
            self.path,
            ", ".join(f"{name}.* ({number})" for name, number in sorted(unread.items())) or "none",
        )
        parts = [file.part(names) for file, names in files.items()]
        return {name: file for file in parts for name in file.tensors}

    def extra_files(self) -> Sequence[Path]:
        return [path for path in super().extra_files() if path.name not in PROCESSORS]


def _local(folder: str | Path) -> Path:
    """A local folder, or the snapshot of a model of the hub where it can be reached."""
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise PretrainedError(f"{folder}: is a file; a folder with {CONFIG} is needed")
    if not _HUB_ID.fullmatch(str(folder)):
        raise PretrainedError(f"{folder}: no such folder")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise PretrainedError(
            f"{folder}: no such folder; a model of the hub needs the package huggingface_hub"
        )
    import huggingface_hub

    wanted = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    # Subfolders and Mistral's consolidated files have the same weights in other forms.
    other = ["*/*", "consolidated*"]
    fetch = functools.partial(huggingface_hub.snapshot_download, ignore_patterns=other)
    try:
        return Path(fetch(str(folder), allow_patterns=wanted))
    except Exception as error:  # the library raises those of several HTTP clients
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PretrainedError(
            f"{folder}: no such folder, and the hub has no such model or cannot be reached: "
            f"{reason[0]}"
        ) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        needs = "; `jaxspeed checkpoint export --format hf` writes a run's" * (path.name == CONFIG)
        raise PretrainedError(f"{path}: missing{needs}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PretrainedError(f"{path}: cannot be read: {error}") from None
