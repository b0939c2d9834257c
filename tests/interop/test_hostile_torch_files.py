"""Hostile checkpoints of DeepSpeed and torch: nothing runs or hangs, and there is one error."""

import io
import os
import random
import shutil
import struct
import subprocess
import time
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.torch_runs import read_torch_run
from tests.interop import torch_files as files
from tests.interop.test_torch_runs import FORMATS, random_values

pytestmark = pytest.mark.fast

SECONDS = 20
SYSTEM = files.Global("os", "system")
MODEL, OPTIM = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
FLOAT = np.arange(6, dtype=np.float32)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """A process, a shell or an evaluation fails the test, and so does the file of EVIL."""
    monkeypatch.chdir(tmp_path)
    ran = []
    runs = {"system": ran.append, "popen": ran.append, "execv": ran.append, "fork": ran.append}
    with mock.patch.multiple(os, **runs), mock.patch.object(subprocess, "Popen", ran.append):
        yield
    assert not ran
    assert not (tmp_path / "ran").exists()


def evil(opcode=b"R"):
    return files.Call(SYSTEM, ("touch ran",), opcode=opcode)


def read_all(folder):
    """The error with which a folder is refused; empty if all of it can be read."""
    begun = time.monotonic()
    try:
        run = read_torch_run(folder)
        for tensors in (run.parameters, *run.moments.values()):
            for tensor in tensors.values():
                assert tensor.array().nbytes <= 1 << 20
        says = ""
    except PretrainedError as error:
        says = str(error)
        assert says
    assert time.monotonic() - begun < SECONDS
    return says


def model_states(folder, **changes):
    """Other values of a model's states."""
    values = random_values()
    shapes = {name: files.size(*x.shape) for name, x in values[""].items()}
    module = {name: files.Tensor(x) for name, x in values[""].items()}
    state = files.counts(module=module, param_shapes=[shapes]) | changes
    files.deepspeed(folder, 1, values)
    (folder / "saved" / MODEL).write_bytes(files.saved(state))
    return folder


def optimizer_states(folder, **changes):
    """Other values of the optimizer's states of one rank, which has all parameters."""
    values = random_values()
    files.deepspeed(folder, 1, values, ranks=1)
    sizes, start = {}, 0
    for name, x in values[""].items():
        sizes[name] = files.fragment(x.size, start)
        start += x.size
    moments = {k: files.Tensor(files.flat(x)) for k, x in values.items() if k}
    state = {
        "loss_scaler": files.STATIC, "zero_stage": files.stage(1), "partition_count": [1],
        "single_partition_of_fp32_groups": [files.Tensor(files.flat(values[""]))],
        "base_optimizer_state": {"state": {0: {"step": 5, **moments}}, "param_groups": [{}]},
        "param_slice_mappings": [sizes],
    } | changes  # fmt: skip
    content = files.saved({"optimizer_state_dict": state})
    (folder / "saved" / OPTIM).write_bytes(content)
    return folder


def one_file(folder, content):
    """A universal checkpoint of which one file has this content."""
    files.universal(folder, random_values())
    (folder / "zero" / "a.weight" / "fp32.pt").write_bytes(content)
    return folder


def one_tensor(folder, **claims):
    return one_file(folder, files.saved({"param": files.Tensor(FLOAT, **claims)}))


def pickle_of(folder, code):
    return one_file(folder, files.saved(files.Bytes(code)))


def metadata_of(folder, change):
    """torch's DCP with other bytes of `.metadata`."""
    files.dcp(folder, random_values())
    path = folder / ".metadata"
    path.write_bytes(change(path.read_bytes()))
    return folder


def replaced(old, new):
    def change(data):
        assert old in data
        return data.replace(old, new)

    return change


text = files.text


def dcp_entry(key, old, new):
    """A change of a number of the first entry of storage_data."""
    return replaced(text(key) + text(old), text(key) + text(new))


# Where a call of os.system is in place of a value that is needed.
NESTED = {
    **{f"model, {key}": lambda f, key=key: model_states(f, **{key: evil()})
       for key in ("module", "param_shapes", "global_steps", "skipped_steps", "lr_scheduler",
                   )},
    "model, a shape": lambda f: model_states(f, param_shapes=[{"a.weight": evil()}]),
    **{f"optimizer, {key}": lambda f, key=key: optimizer_states(f, **{key: evil()})
       for key in ("base_optimizer_state", "single_partition_of_fp32_groups", "partition_count",
                   "param_slice_mappings")},
    "optimizer, a master": lambda f: optimizer_states(
        f, single_partition_of_fp32_groups=[evil()]),
    "optimizer, a slice": lambda f: optimizer_states(
        f, param_slice_mappings=[{"a.weight": evil()}]),
    "optimizer, a number of a slice": lambda f: optimizer_states(
        f, param_slice_mappings=[{"a.weight": files.fragment(evil(), 0)}]),
    "optimizer, a state": lambda f: optimizer_states(
        f, base_optimizer_state={"state": {0: evil()}, "param_groups": []}),
    "optimizer, a step": lambda f: optimizer_states(
        f, base_optimizer_state={"state": {0: {"step": evil()}}, "param_groups": []}),
    "universal, all of a file": lambda f: one_file(f, files.saved(evil())),
    "universal, a tensor": lambda f: one_file(f, files.saved({"param": evil()})),
    "a tensor's shape": lambda f: one_tensor(f, shape=evil()),
    "a tensor's strides": lambda f: one_tensor(f, strides=(evil(),)),
    "a tensor's offset": lambda f: one_tensor(f, offset=evil()),
    "a storage's size": lambda f: one_tensor(f, size=evil()),
    "a storage's class": lambda f: pickle_of(
        f, text(("storage", SYSTEM, "0", "cpu", 1)) + b"Q"),
    "a constructor with keywords": lambda f: model_states(f, client=files.Bytes(
        text(SYSTEM) + text(("touch ran",)) + b"}" + b"\x92")),
    "the metadata": lambda f: metadata_of(f, lambda _: files.pickled(evil())),
    "the metadata's tensors": lambda f: metadata_of(f, replaced(
        text("state_dict_metadata"), text("state_dict_metadata") + text(evil()) + text("other"))),
    "the metadata's places": lambda f: metadata_of(f, replaced(
        text("storage_data"), text("storage_data") + text(evil()) + text("other"))),
    "a file's name": lambda f: metadata_of(f, replaced(text("__0_0.distcp"), text(evil()))),
    "a chunk's place": lambda f: metadata_of(f, replaced(
        text("offsets"), text("offsets") + text(evil()) + text("other"))),
}  # fmt: skip
# A call in a place that is not needed is not made either.
UNREAD = {
    "model, parallel dimensions": lambda f: model_states(
        f, checkpoint_parallel_dimensions=evil(), shared_params=evil()),
    "model, an unknown key": lambda f: model_states(f, client_state=evil()),
    "model, deep in lists": lambda f: model_states(f, client={"a": [({"b": [evil()]},)]}),
    "a state of a list of tensors": lambda f: model_states(
        f, client=files.Call(files.Global("collections", "OrderedDict"), (), {"x": evil()})),
    "an object without a constructor": lambda f: model_states(f, client=evil(b"\x81")),
    "the class of a state": lambda f: model_states(f, client=files.Call(
        files.Global("builtins", "eval"), ("1",), {"__setstate__": SYSTEM})),
    "names on the stack": lambda f: model_states(f, client=files.Bytes(
        text("os") + text("system") + b"\x93" + text(("touch ran",)) + b"R")),
    "an attribute of a module": lambda f: model_states(f, client=files.Call(
        files.Global("builtins", "getattr"), (SYSTEM, "__call__"))),
    "planner_data": lambda f: metadata_of(f, replaced(
        text("state_dict_metadata"), text("planner_data") + text(evil())
        + text("state_dict_metadata"))),
}  # fmt: skip
INSTRUCTIONS = {
    "INST": b"(X\x09\x00\x00\x00touch ranios\nsystem\n",
    "OBJ": b"(cos\nsystem\nX\x09\x00\x00\x00touch rano",
    "EXT1": b"\x82\x01", "EXT4": b"\x84\x01\x00\x00\x00", "PERSID": b"P0\n",
    "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"N\x98",
    "an unknown one": b"\xff", "no value": b"R", "a mark that is not there": b"t",
    "a memo that is not there": b"h\x07", "a call of a call": text(evil()) + b")R",
    "a call of a text": text("os.system") + b")R", "a key that is a list": b"}]Ns",
    "a key that is nested": b"}" + b")" + b"\x85" * 1_000_000 + b"Ns",
    "no stop": b"N" * 9 + b"0" * 9,
}  # fmt: skip
LONG = 1 << 22


def integer(x):
    data = x.to_bytes((x.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(data)) + data


def numbered(code, count=100_000):
    return b"".join(code(i) for i in range(1, count))


# What is remembered once is copied, hashed or compared often: gigabytes, or hours.
REPEATED = {
    "names of 4 MB": text("a" * LONG) + b"q\0" + text("b") + b"q\1" + b"h\0h\1\x93" * 100_000,
    "copies of a list": b"(" + b"N" * LONG + b"l\x85q\0c__builtin__\nset\nq\1"
    + b"h\1h\0R" * 100_000 + b"\xff",
    "copies of pairs": b"(" + numbered(lambda i: b"(J" + struct.pack("<i", i) + b"Nl")
    + b"l\x85q\0ccollections\nOrderedDict\nq\1" + b"h\1h\0R" * 100_000,
    "copies of fields": b"}(" + numbered(lambda i: b"J" + struct.pack("<i", i) + b"N")
    + b"uq\0ctorch.distributed.checkpoint.metadata\nX\nq\1" + b"h\1)\x81h\0b" * 100_000,
    "many arguments": b"(" + b"N" * LONG + b"tq\0ctorch._utils\n_rebuild_parameter\nq\1"
    + b"h\1h\0R0" * 100_000,
    "many arguments of a tensor": b"(ctorch._utils\n_rebuild_parameter\nN(" + b"N" * LONG
    + b"ttq\0ctorch._tensor\n_rebuild_from_type_v2\nq\1" + b"h\1h\0R0" * 100_000 + b"\xff",
    "a key of 32 million bits": integer(1 << 8 * LONG) + b"q\0}" + b"h\0Ns" * 100_000,
    "keys of one hash": b"}" + numbered(lambda i: integer(i * ((1 << 61) - 1)) + b"Ns"),
    "numbers of one hash": b"N" + numbered(lambda i: b"p%d\n" % (i * ((1 << 61) - 1))),
    "long texts that are equal": text("a" * LONG) + b"q\0" + text("a" * LONG) + b"q\1}"
    + b"h\0Nsh\1Ns" * 100_000,
}  # fmt: skip
BOMBS = {
    "tuples in tuples": b")" + b"\x85" * 1_000_000,
    "lists in lists": b"(" * 1_000_000 + b"N" + b"l" * 1_000_000,
    "a list in itself": b"]q\x00" + b"h\x00a" * 100_000,
    "doubled lists": b"](NNe" + b"q\x00](h\x00h\x00e" * 200,
    "a memo of 2 billion": b"Nr\xff\xff\xff\x7f",
    "an integer of 2 GB": b"\x8b\xff\xff\xff\x7f" + b"1",
    "a text of 16 EB": b"\x8d" + b"\xff" * 7 + b"\x0f" + b"a",
    "bytes of 16 EB": b"\x8e" + b"\xff" * 8,
    "a bytearray of 72 PB": b"\x96" + b"\xff" * 7 + b"\0",
    "a set of nested tuples": b"()" + b"\x85" * 1_000_000 + b"\x91",
    "digits": b"I" + b"9" * 1_000_000 + b"\n",
    "long digits": b"L" + b"9" * 1_000_000 + b"L\n",
}
CLAIMS = {
    "a shape beyond the storage": {"shape": (7,), "strides": (1,)},
    "an offset beyond the storage": {"offset": 1},
    "a negative offset": {"offset": -1},
    "strides beyond the storage": {"strides": (2,)},
    "negative strides": {"strides": (-1,)},
    "a tensor of one element, 2^60 times": {"shape": (1 << 30, 1 << 30), "strides": (0, 0)},
    "a shape of 2^80": {"shape": (1 << 40, 1 << 40), "strides": (1 << 40, 1)},
    "a size of 2^64": {"shape": (1 << 64,)},
    "a shape that is true": {"shape": (True,), "strides": (1,)},
    "more strides than dims": {"strides": (1, 1)},
    "a thousand dims": {"shape": (1,) * 1000, "strides": (1,) * 1000},
    "a storage beyond its file": {"size": 1 << 40},
    "a storage of no size": {"size": -1},
}
SLICES = {
    "a slice beyond its partition": files.fragment(15, 1 << 20),
    "a slice before its partition": files.fragment(15, -4),
    "a slice of another size": files.fragment(14, 0),
    "a slice of 2^63": files.fragment((1 << 63) + 15, 0),
    "a slice of a parameter without a name": {7: files.fragment(15, 0)},
    "a slice without numbers": files.fragment(None, None),
}
PLACES = {
    "an offset beyond the file": dcp_entry("offset", 0, 1 << 40),
    "a negative place": dcp_entry("offset", 0, -8),
    "an offset inside another": dcp_entry("offset", 0, 4),
    "a folder above": replaced(text("__0_0.distcp"), text("../x.distcp")),
    "a path": replaced(text("__0_0.distcp"), text("/etc/passwd")),
    "a file that is absent": replaced(text("__0_0.distcp"), text("__7_0.distcp")),
    "a tensor of 2^62": replaced(text((7,)), text((1 << 62,))),
    "chunks that overlap": replaced(text((3, 0)), text((2, 0))),
    "another dtype": replaced(b"ctorch\nfloat32\n", b"ctorch\nfloat16\n"),
    "a dtype that is none": replaced(b"ctorch\nfloat32\n", b"cos\nsystem\n"),
    "no end": lambda data: data[:-40],
    "nothing": lambda data: b"",
}


def cases():
    of_files = {
        **{f"in place of {name}": (make, True) for name, make in NESTED.items()},
        **{f"beside: {name}": (make, False) for name, make in UNREAD.items()},
    }
    for name, code in (INSTRUCTIONS | BOMBS | REPEATED).items():
        of_files[f"instruction: {name}"] = (lambda f, code=code: pickle_of(f, code)), True
    for name, claims in CLAIMS.items():
        of_files[f"tensor: {name}"] = (lambda f, claims=claims: one_tensor(f, **claims)), True
    for name, code in SLICES.items():
        of_files[f"slice: {name}"] = (
            lambda f, code=code: optimizer_states(
                f, param_slice_mappings=[code if type(code) is dict else {"a.weight": code}]
            ),
            True,
        )
    for name, change in PLACES.items():
        of_files[f"dcp: {name}"] = (lambda f, change=change: metadata_of(f, change)), True
    return of_files


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_what_a_file_names_is_neither_imported_nor_called(tmp_path, name):
    make, is_refused = CASES[name]
    says = read_all(make(tmp_path / "run"))
    assert bool(says) == is_refused, says
    if name.startswith("in place of") and "os.system" in says:
        assert "os.system, which is not read" in says


# -- archives --------------------------------------------------------------------------------------


def archive(members, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as out:
        for name, content in members:
            out.writestr(name, content)
    return file.getvalue()


SOUND = files.saved({"param": files.Tensor(FLOAT)})
DATA = files.pickled({"param": files.Tensor(FLOAT)})
TENSOR = ("a/data/0", FLOAT.tobytes())


def central(content, **changes):
    """An archive whose first entry in the directory has other numbers."""
    at = content.index(b"PK\x01\x02")
    entry = bytearray(content[at:])
    for name, value in changes.items():
        offset, form = {"compressed": (20, "<I"), "size": (24, "<I"), "header": (42, "<I"),
                        "method": (10, "<H"), "flags": (8, "<H")}[name]  # fmt: skip
        struct.pack_into(form, entry, offset, value)
    return content[:at] + bytes(entry)


ARCHIVES = {
    "a compressed pickle": archive([("a/data.pkl", DATA), TENSOR], zipfile.ZIP_DEFLATED),
    "a bomb of zeros": archive(
        [("a/data.pkl", DATA), ("a/data/0", bytes(50 << 20))], zipfile.ZIP_DEFLATED
    ),
    "two pickles": archive([("a/data.pkl", DATA), ("b/data.pkl", DATA), TENSOR]),
    "no pickle": archive([TENSOR]),
    "no storage": archive([("a/data.pkl", DATA)]),
    "a storage that is too short": archive([("a/data.pkl", DATA), ("a/data/0", b"123")]),
    "a big-endian machine": archive([("a/data.pkl", DATA), TENSOR, ("a/byteorder", b"big")]),
    "a size beyond the file": central(SOUND, size=1 << 31, compressed=1 << 31),
    "two sizes": central(SOUND, size=4),
    "a member beyond the file": central(SOUND, header=1 << 30),
    "a member that is no member": central(SOUND, header=3),
    "an unknown compression": central(SOUND, method=99),
    "an encrypted member": central(SOUND, flags=1),
    "no directory": SOUND[: SOUND.index(b"PK\x01\x02")],
    "half": SOUND[: len(SOUND) // 2],
    "two bytes": b"PK",
    "nothing": b"",
    "a pickle of torch before 1.6": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
    "a text": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_lies_is_refused(tmp_path, name):
    says = read_all(one_file(tmp_path / "run", ARCHIVES[name]))
    assert "fp32.pt" in says


def test_a_directory_of_an_archive_is_not_read_into_memory(tmp_path):
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, 200 << 20, 0, 0)
    folder = one_file(tmp_path / "run", b"PK")
    with (folder / "zero" / "a.weight" / "fp32.pt").open("r+b") as file:
        file.truncate(200 << 20)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(end)
    assert "its directory has 209,715,200 bytes" in read_all(folder)


def test_a_file_beside_the_folder_is_not_read(tmp_path):
    change = replaced(text("__0_0.distcp"), text("../__0_0.distcp"))
    folder = metadata_of(tmp_path / "run", change)
    shutil.copy(folder / "__0_0.distcp", tmp_path)
    assert "a file that is not in its folder" in read_all(folder)


@pytest.mark.parametrize("latest", ["../run/saved", "..", "/etc", "absent", "", "\0", "a" * 5000])
def test_latest_names_a_folder_beside_it(tmp_path, latest):
    folder = files.deepspeed(tmp_path / "run", 1, random_values())
    (folder / "latest").write_text(latest)
    assert "latest names no folder" in read_all(folder)


def test_a_file_that_is_a_folder_is_refused(tmp_path):
    folder = files.deepspeed(tmp_path / "run", 1, random_values())
    (folder / "saved" / MODEL).unlink()
    (folder / "saved" / MODEL).mkdir()
    assert MODEL in read_all(folder)


# -- mutations -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return [make(folder / name, random_values()) for name, make in FORMATS.items()]


def mutated(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8, 40])):
        at = draw.randrange(len(data) or 1)
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at:]
            case 2:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 3:
                data[at : at + 8] = bytes([draw.choice([0, 255])] * 8)
            case 4:
                begin = draw.randrange(len(data) or 1)
                data[at : at + 16] = data[begin : begin + 16]
    return bytes(data)


def mutate(sound, there, seeds):
    refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        folder = Path(shutil.copytree(draw.choice(sound), there / str(seed)))
        chosen = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "latest"]
        path = draw.choice(chosen)
        path.write_bytes(mutated(path.read_bytes(), draw))
        refused += bool(read_all(folder))
        shutil.rmtree(folder)
    return refused


def test_forty_random_mutations_are_refused_or_harmless(sound, tmp_path):
    assert all(read_all(folder) == "" for folder in sound)
    assert mutate(sound, tmp_path, range(40)) > 20


@pytest.mark.sampled
def test_a_hundred_and_sixty_more_mutations(sound, tmp_path):
    assert mutate(sound, tmp_path, range(40, 200)) > 80
