"""Folders of checkpoints that hold what is not ours, or that somebody has forged."""

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest
from etils import epath

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, stores, verify
from tests.checkpoint import states


@pytest.fixture(scope="module")
def engine():
    return states.engine(stage=1)


@pytest.fixture(scope="module")
def sound(engine, tmp_path_factory):
    """A checkpoint "a" with a file."""
    folder = tmp_path_factory.mktemp("sound")
    save(engine, Checkpointer(folder), "a", files={"notes": b"ours"})
    return folder


@pytest.fixture
def forged(sound, tmp_path):
    """A copy of the checkpoint, to be changed and sealed."""
    return Path(shutil.copytree(sound / "a", tmp_path / "a"))


def save(engine, saver, *tags, **more):
    for tag in tags:
        saver.save(engine.program, engine.state, tag=tag, **more)
    saver.close()


def seal(checkpoint: Path, forget=()) -> None:
    """Write a manifest of the files as they are now."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_text())
    del body["crc32"]
    for name in [*body["files"]]:
        content = (checkpoint / name).read_bytes()
        body["files"][name] = [len(content), zlib.crc32(content)]
        if name in forget:
            del body["files"][name]
    crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({**body, "crc32": crc}))


def change_header(checkpoint: Path, **fields) -> None:
    path = checkpoint / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    seal(checkpoint)


# -- symlinks -------------------------------------------------------------------------------------


def test_an_old_checkpoint_that_is_a_symlink_is_unlinked_and_saves_go_on(engine, tmp_path):
    folder, other = tmp_path / "checkpoints", tmp_path / "other disk"
    save(engine, Checkpointer(folder), "step-00000001")
    (folder / "step-00000001").rename(other)
    (folder / "step-00000001").symlink_to(other)
    saver = Checkpointer(folder, keep=1)
    save(engine, saver, "step-00000002", "step-00000003", "step-00000004")
    assert os.listdir(folder) == ["step-00000004"]
    assert verify(folder) == [] and (other / "manifest.json").exists()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_checkpoint_replaces_a_symlink_of_its_name(engine, tmp_path, dangling):
    folder, other = tmp_path / "checkpoints", tmp_path / "other disk"
    folder.mkdir()
    if not dangling:
        other.mkdir()
        (other / "file").write_text("theirs")
    (folder / "best").symlink_to(other)
    save(engine, Checkpointer(folder), "best", "best")
    assert os.listdir(folder) == ["best"] and verify(folder) == []
    assert dangling or (other / "file").read_text() == "theirs"


# -- folders of others ----------------------------------------------------------------------------


def test_only_what_a_save_has_made_is_removed(engine, tmp_path):
    folder, aside = tmp_path / "checkpoints", tmp_path / "aside"
    save(engine, Checkpointer(folder), "best")
    aside.mkdir()
    shutil.copytree(folder / "best", folder / "best.writing")
    for name in ("notes.writing", "notes.removed", "step-00000007.removed"):
        (folder / name).mkdir()
        (folder / name / "mine").write_text("mine")
    (folder / "empty.writing").mkdir()
    (folder / "link.writing").symlink_to(aside)
    (folder / "link.removed").symlink_to(aside)
    before = set(os.listdir(folder))
    save(engine, Checkpointer(folder, keep=1), "step-00000007", "step-00000008")
    assert set(os.listdir(folder)) == before | {"step-00000008"}
    assert (folder / "step-00000007.removed" / "mine").read_text() == "mine"


def test_what_an_interrupted_save_or_removal_has_left_is_removed(tmp_path, monkeypatch):
    store = stores.LocalStore(epath.Path(tmp_path))
    store.begin("a")
    (store.writing("a") / "arrays").mkdir()
    store._release("a")  # as the system does it for a process that has ended
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "checkpoint.json").write_text("{}")
    (tmp_path / "b.writing" / "arrays").mkdir(parents=True)  # killed before it was marked
    with monkeypatch.context() as patched:
        patched.setattr(stores.shutil, "rmtree", lambda *_, **__: None)
        store.remove("old")  # killed before its end
    assert sorted(os.listdir(tmp_path)) == ["a.writing", "b.writing", "old.removed"]
    store.begin("b")
    assert os.listdir(tmp_path) == ["b.writing"]


def test_a_save_of_another_process_is_not_disturbed(tmp_path):
    first, second = (stores.LocalStore(epath.Path(tmp_path)) for _ in range(2))
    first.begin("a")
    (first.writing("a") / "manifest.json").write_text("{}")
    second.begin("b")
    assert (tmp_path / "a.writing" / "manifest.json").exists()
    with pytest.raises(jaxspeed.CheckpointError, match=r"a\.writing exists, and is of another"):
        second.begin("a")
    first.commit("a")
    second.commit("b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert os.listdir(tmp_path / "a") == ["manifest.json"]


def test_what_is_left_and_cannot_be_removed_stops_no_save(engine, tmp_path, monkeypatch, caplog):
    store = stores.LocalStore(epath.Path(tmp_path))
    store.begin("a")
    store._release("a")

    def busy(*_, **__):
        raise OSError("device or resource busy")

    monkeypatch.setattr(stores.shutil, "rmtree", busy)
    save(engine, Checkpointer(tmp_path), "b")
    assert verify(tmp_path) == [] and "a.writing cannot be removed: device or" in caplog.text


# -- forged checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"files": ["../../../etc/passwd"]},
        {"files": ["/etc/passwd"]},
        {"files": [".."]},
        {"files": [7]},
        {"files": {"a": 1}},
        {"leaves": []},
        {"leaves": {"step": {"shape": 3}}},
        {"leaves": {"step": {"shape": [], "stored": [], "dtype": "no such", "key": None}}},
        {"time": "today"},
        {"step": None},
        {"mesh": [8]},
        {"client_state": 5},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_a_forged_header_is_refused_wherever_it_is_read(engine, forged, fields):
    change_header(forged, **fields)
    with pytest.raises(jaxspeed.CheckpointError, match=r"checkpoint\.json is damaged"):
        Checkpointer(forged.parent).restore(engine.program)
    (info,) = Checkpointer(forged.parent).list()
    assert not info.ok and "damaged" in info.problem
    (problem,) = verify(forged.parent)
    assert "checkpoint.json is damaged" in problem


@pytest.mark.parametrize("text", ["[" * 100_000, "7", '"x"', "\ud800", "{"])
@pytest.mark.parametrize("name", ["checkpoint.json", "manifest.json"])
def test_json_of_any_shape_is_refused(engine, forged, name, text):
    (forged / name).write_bytes(text.encode(errors="surrogatepass"))
    if name != "manifest.json":
        seal(forged)
    assert f"{name} is damaged" in verify(forged.parent)[0]
    with pytest.raises(jaxspeed.CheckpointError, match="damaged"):
        Checkpointer(forged.parent).restore(engine.program)


@pytest.mark.parametrize("name", ["../b/secret", "/etc/hostname", "arrays/../../b/secret", "", "."])
def test_a_manifest_of_paths_outside_of_the_folder_is_refused(engine, forged, name):
    (forged.parent / "b").mkdir()
    (forged.parent / "b" / "secret").write_text("theirs")
    path = forged / "manifest.json"
    body = json.loads(path.read_text())
    body["files"][name] = [6, zlib.crc32(b"theirs")]
    del body["crc32"]
    crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({**body, "crc32": crc}))
    assert "manifest.json is damaged" in verify(forged.parent, "a")[0]
    with pytest.raises(jaxspeed.CheckpointError, match="damaged"):
        Checkpointer(forged.parent).restore(engine.program, tag="a")


def forget_notes(checkpoint):
    seal(checkpoint, forget={"files/notes"})
    return "files/notes is not in manifest.json"


def forget_header(checkpoint):
    seal(checkpoint, forget={"checkpoint.json"})
    return "checkpoint.json is not in manifest.json"


def forget_array(checkpoint):
    body = json.loads((checkpoint / "manifest.json").read_text())
    name = next(name for name in body["files"] if "/d/" in name)
    seal(checkpoint, forget={name})
    return f"{name} is not in manifest.json"


def add_array(checkpoint):
    (checkpoint / "arrays" / "d" / "more").write_text("theirs")
    return "arrays/d/more is not in manifest.json"


def link_file(checkpoint):
    """Its content is as the manifest says, until somebody changes it elsewhere."""
    (checkpoint / "files" / "notes").rename(checkpoint.parent / "notes")
    (checkpoint / "files" / "notes").symlink_to(checkpoint.parent / "notes")
    return "files/notes is a link out of the checkpoint"


def link_folder(checkpoint):
    (checkpoint / "files").rename(checkpoint.parent / "files")
    (checkpoint / "files").symlink_to(checkpoint.parent / "files")
    return "files/notes is a link out of the checkpoint"


def link_in_circles(checkpoint):
    for name in ("x", "y"):
        (checkpoint / "arrays" / name).symlink_to(checkpoint / "arrays")
    return "arrays/x is not in manifest.json"


@pytest.mark.parametrize(
    "change",
    [forget_notes, forget_header, forget_array, add_array, link_file, link_folder, link_in_circles],
)
def test_each_file_that_is_read_is_in_the_manifest_and_in_the_folder(engine, forged, change):
    problem = change(forged)
    assert any(problem in found for found in verify(forged.parent, "a"))
    with pytest.raises(jaxspeed.CheckpointError, match=problem):
        Checkpointer(forged.parent).restore(engine.program, tag="a")
    if problem.startswith("files/"):  # they are read before the arrays
        assert Checkpointer(forged.parent).files("a") == {}


def test_a_note_beside_the_files_of_a_checkpoint_is_no_damage(engine, forged):
    (forged / "NOTES.txt").write_text("the best one")
    assert verify(forged.parent) == []
    assert Checkpointer(forged.parent).restore(engine.program).files == {"notes": b"ours"}
    assert Checkpointer(forged.parent).files("a") == {"notes": b"ours"}
