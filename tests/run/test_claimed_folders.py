"""Who may use the folder of a run and that of its checkpoints: one process, of one run."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
from etils import epath

import jaxspeed
from jaxspeed.checkpoint import stores
from jaxspeed.run import claim
from jaxspeed.run.folder import RunFolder

pytestmark = pytest.mark.fast

SEED_5, SEED_6 = {"data": "1a2b", "seed": 5}, {"data": "1a2b", "seed": 6}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(claim, "TOUCH_SECONDS", 0.2)


@pytest.fixture(params=["folder", "bucket", pytest.param("s3", marks=pytest.mark.sampled)])
def shared(request, tmp_path):
    """A place of checkpoints that several runs name."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return "s3://bucket/shared"
    place = epath.Path(tmp_path) / "shared"
    return stores.ObjectStore(place) if request.param == "bucket" else place


def opened(path, whose=SEED_5, checkpoints=None, **files):
    folder = RunFolder(path, checkpoints)
    folder.open(whose, files)
    return folder


def save(place, tag="step-00000001"):
    """What is left of a run that has no identity."""
    store = stores.store_at(place)
    if isinstance(store, stores.LocalStore):
        (store.root / tag / "arrays").mkdir(parents=True)
    elif stores.is_local(store.root):
        (store.root / tag).mkdir(parents=True)
    (store.root / tag / "manifest.json").write_text("{}")


def test_checkpoints_in_use_are_refused_whatever_the_output(tmp_path, shared):
    first = opened(tmp_path / "a", checkpoints=shared)
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* in use by another run"):
        opened(tmp_path / "b", checkpoints=shared)
    first.close()
    opened(tmp_path / "b", checkpoints=shared).close()


def test_checkpoints_of_another_run_are_refused_with_what_differs(tmp_path, shared):
    opened(tmp_path / "a", checkpoints=shared).close()
    with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* another run") as caught:
        opened(tmp_path / "b", SEED_6, shared)
    assert "\n  seed: 5 there, 6 here\n" in str(caught.value) and "data:" not in str(caught.value)
    # The run that was refused has left nothing: it begins with other checkpoints.
    opened(tmp_path / "b", SEED_6, tmp_path / "other").close()


def test_of_another_model_what_differs_is_shown(tmp_path):
    sizes = {"family": "llama", "config": {f"size_{i}": i for i in range(20)}}
    path = "/data/" + "a" * 80
    before = {"model": sizes, "tokenizer": f"{path}/old.json", "seed": 5}
    now = {**before, "model": {**sizes, "config": {**sizes["config"], "size_19": 7, "more": 1}}}
    opened(tmp_path / "a", before).close()
    with pytest.raises(jaxspeed.ConfigError, match="another run") as caught:
        opened(tmp_path / "a", {**now, "tokenizer": f"{path}/new.json"})
    assert str(caught.value).splitlines()[1:-1] == [
        "  model.config.more: not set there, 1 here",
        "  model.config.size_19: 19 there, 7 here",
        f'  tokenizer: ...{"a" * 19}/old.json" there, ...{"a" * 19}/new.json" here',
    ]


def test_the_checkpoints_of_an_output_are_refused_to_another_one(tmp_path):
    opened(tmp_path / "a").close()
    with pytest.raises(jaxspeed.ConfigError, match=r"(?s)run\.checkpoints: .* seed: 5 there"):
        opened(tmp_path / "b", SEED_6, tmp_path / "a" / "checkpoints")


def test_checkpoints_without_identity_belong_to_the_output_that_has_begun(tmp_path, shared):
    save(shared)
    with pytest.raises(jaxspeed.ConfigError, match=r"checkpoints of an unknown run.*init_from"):
        opened(tmp_path / "new", checkpoints=shared)
    opened(tmp_path / "old", checkpoints=tmp_path / "aside").close()
    opened(tmp_path / "old", checkpoints=shared).close()
    with pytest.raises(jaxspeed.ConfigError, match="holds another run"):
        opened(tmp_path / "new", SEED_6, shared)


def test_an_output_may_be_the_folder_of_its_checkpoints(tmp_path):
    for _ in range(2):
        opened(tmp_path / "a", checkpoints=tmp_path / "a", tokenizer=b"{}").close()
        save(tmp_path / "a", f"step-0000000{_}")
    assert (tmp_path / "a" / "tokenizer").read_bytes() == b"{}"


def test_other_data_are_told_by_the_identity_of_the_checkpoints(tmp_path, shared):
    opened(tmp_path / "a", checkpoints=shared).close()
    reader = RunFolder(tmp_path / "nothing", shared)
    assert reader.differs_in(data="3c4d") and not reader.differs_in(data="1a2b", unknown=1)


@pytest.mark.parametrize("which", [0, 1], ids=["output", "checkpoints"])
def test_a_folder_in_use_on_another_host_is_refused_unless_that_host_has_died(
    tmp_path, monkeypatch, which
):
    """Also where the file system has no locks between hosts: the owner touches a file."""
    there = opened(tmp_path / "a", checkpoints=tmp_path / "c")
    monkeypatch.setattr(claim.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(claim.socket, "gethostname", lambda: "another")
    output = tmp_path / ("a" if which == 0 else "b")
    with pytest.raises(jaxspeed.ConfigError, match="in use by another run, on "):
        opened(output, checkpoints=tmp_path / "c")
    for each in there._claims:  # it dies without closing the folder
        each._closed.set()
        each._toucher.join()
    clock = [0.0]
    own = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda x: clock.append(clock.pop() + x))
    monkeypatch.setattr(claim, "time", own)
    here = opened(output, checkpoints=tmp_path / "c")
    assert 3 <= clock[0] / claim.TOUCH_SECONDS < 4  # not for each of the two
    here.close()
    assert (output / ".lock").read_text() == (tmp_path / "c" / ".lock").read_text() == ""


def test_a_bucket_whose_owner_has_died_is_free_after_a_while(tmp_path):
    bucket = stores.ObjectStore(epath.Path(tmp_path) / "bucket")
    there = opened(tmp_path / "a", checkpoints=bucket)
    there._claims[1]._closed.set()
    opened(tmp_path / "b", checkpoints=bucket).close()


def test_of_two_that_saw_a_bucket_free_one_has_it(tmp_path, monkeypatch):
    here, there = (
        claim.Claim("run.checkpoints", stores.ObjectStore(epath.Path(tmp_path))) for _ in "ab"
    )
    monkeypatch.setattr(
        here, "_owner_elsewhere", lambda: here._lock_text() + str(there.take() or "")
    )
    with pytest.raises(jaxspeed.ConfigError, match="in use by another run, on "):
        here.take()
    there.check()
    there.release()


# -- files that are not what they should be --------------------------------------------------------


@pytest.mark.parametrize("there", [True, False], ids=["file", "dangling"])
def test_a_lock_that_is_a_symlink_is_refused_and_its_target_stays(tmp_path, there):
    target = tmp_path / "theirs"
    if there:
        target.write_text("precious")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(target)
    with pytest.raises(jaxspeed.ConfigError, match=r"\.lock is a symlink; remove it"):
        opened(tmp_path / "a")
    assert target.exists() == there and (not there or target.read_text() == "precious")


def test_a_lock_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / ".lock")
    with pytest.raises(jaxspeed.ConfigError, match=r"\.lock is no regular file; remove it"):
        opened(tmp_path / "a")


def test_no_file_is_written_through_a_symlink(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json.part").symlink_to(tmp_path / "theirs")
    opened(tmp_path / "a").close()
    assert (tmp_path / "theirs").read_text() == "precious"
    assert json.loads((tmp_path / "a" / "run.json").read_text()) == SEED_5


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("which", [".", "checkpoints"])
def test_a_folder_that_is_removed_while_it_is_in_use_is_noticed(tmp_path, which, made_anew):
    folder = opened(tmp_path / "a")
    folder.check()
    gone = tmp_path / "a" / which
    shutil.rmtree(gone)
    if made_anew:
        gone.mkdir()
    with pytest.raises(jaxspeed.RunError, match=f"{gone.resolve()} was removed"):
        folder.check()
    folder.close()
    assert not made_anew or list(gone.iterdir()) == []


def test_a_new_run_that_is_refused_afterwards_leaves_nothing(tmp_path, shared):
    folder = opened(tmp_path / "a", SEED_5, shared, **{"tokenizer.json": b"{}"})
    folder.withdraw()
    assert not (tmp_path / "a").exists()
    opened(tmp_path / "b", SEED_6, shared).close()
    begun = opened(tmp_path / "b", SEED_6, shared)
    begun.withdraw()  # it was there before
    assert (tmp_path / "b" / claim.WHOSE).exists()
