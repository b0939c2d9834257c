"""Checkpoints in a bucket that speaks S3, on loopback."""

import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, object_storage, verify
from jaxspeed.checkpoint.manifest import NAME
from jaxspeed.checkpoint.stores import store_at
from jaxspeed.cli.main import main
from jaxspeed.run import claim
from tests.checkpoint import states
from tests.support import s3 as faults

URL = f"s3://{faults.BUCKET}/runs/a"


@pytest.fixture(scope="module")
def engine():
    return states.engine(stage=3)


def put(server, folder, prefix):
    """Upload a folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            path = f"/{faults.BUCKET}/{prefix}/{file.relative_to(folder)}"
            assert server.send("PUT", path, file.read_bytes())[0] == 200


def get(server, prefix, folder):
    """Download one."""
    for key, content in server.objects().items():
        if key.startswith(f"{prefix}/"):
            file = folder / key.removeprefix(f"{prefix}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def by_orbax(folder):
    """All arrays that Orbax lists in a folder, as it restores them."""
    at = SingleDeviceSharding(jax.devices()[0])
    with ocp.PyTreeCheckpointer() as orbax:
        names = orbax.metadata(folder).item_metadata.tree
        how = {name: ocp.ArrayRestoreArgs(sharding=at) for name in names}
        return orbax.restore(folder, restore_args=how)


def test_checkpoints_in_a_bucket_are_restored_listed_verified_and_exported(
    engine, s3, tmp_path, capsys
):
    saver = Checkpointer(URL, keep=1)
    for i in range(2):
        states.steps(engine, i, 1)
        tag = saver.save(engine.program, engine.state, files={"a": b"1"})
    expected = states.held(engine)
    restored = saver.restore(engine.program)
    assert [info.tag for info in saver.list()] == [restored.tag] == [tag]
    assert restored.files == {"a": b"1"} and verify(URL) == []
    engine.state = restored.state
    states.assert_same(states.held(engine), expected)
    assert main(["checkpoint", "list", URL]) == main(["checkpoint", "show", URL]) == 0
    assert main(["checkpoint", "verify", URL]) == 0
    assert main(["checkpoint", "export", URL, str(tmp_path / "out")]) == 0
    assert f"{tag}: intact" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 500
    # The manifest was written last, and a data file that changed is damage.

    written = [p for method, p in s3.requests if method == "PUT" and f"/{tag}/" in p]
    assert written[-1].endswith(NAME)
    data = next(p for p in written if "/arrays/ocdbt.process_0/d/" in p)
    s3.send("PUT", data, b"?" + s3.send("GET", data)[2][1:])
    assert main(["checkpoint", "verify", URL]) == 1


def test_what_is_copied_from_a_bucket_to_a_disk_or_back_is_a_checkpoint_there(engine, s3, tmp_path):
    """Orbax restores what TensorStore wrote into the bucket, and the reverse."""
    expected = states.held(engine)
    for place in (tmp_path / "disk", URL):
        saver = Checkpointer(place)
        for _ in range(2):  # over another of the same tag
            saver.save(engine.program, engine.state, tag="a")
        saver.wait()
    put(s3, tmp_path / "disk", "up")
    get(s3, "runs/a", tmp_path / "down")
    listed = by_orbax(tmp_path / "down" / "a" / "arrays")
    assert listed.keys() == Checkpointer(URL).list()[0].leaves.keys()
    for row in engine.program.table:
        inside = tuple(map(slice, row.leaf.shape))
        value = listed[f"params/{row.path}"][inside]
        np.testing.assert_array_equal(value, engine.parameters[row.path])
    states.steps(engine, 0, 1)
    for place in (tmp_path / "down", f"s3://{faults.BUCKET}/up"):
        engine.state = Checkpointer(place).restore(engine.program).state
        states.assert_same(states.held(engine), expected)


def test_listings_of_a_bucket_have_what_others_wrote_meanwhile(s3):
    store = store_at(URL)
    for name in ("a", "b"):
        (store.root / name / NAME).write_text("{}")
        assert set(store.tags()) == ({"a"} if name == "a" else {"a", "b"})
        s3.send("PUT", f"/{faults.BUCKET}/runs/a/{name}-of-another/{NAME}", b"{}")
        assert f"{name}-of-another" in store.tags()
        for other in ("a-of-another", "b-of-another"):
            s3.send("DELETE", f"/{faults.BUCKET}/runs/a/{other}/{NAME}")


def test_a_bucket_has_one_owner(s3, monkeypatch):
    """Of two that saw it free one has it, and so has of two that saw its owner dead."""
    monkeypatch.setattr(claim, "TOUCH_SECONDS", 0.1)
    conditions = []

    def noted(handler):
        names = "If-None-Match", "If-Match"
        conditions.append([name for name in names if name in handler.headers])
        handler.pass_on()

    s3.fault = lambda method, path: noted if method == "PUT" and claim.LOCK in path else None
    first, second, third = (claim.Claim("run.checkpoints", store_at(URL)) for _ in range(3))
    seen = second._lock_text()
    first.take()
    with pytest.raises(jaxspeed.ConfigError, match="in use by another run"):
        third.take()
    monkeypatch.setattr(second, "_owner_elsewhere", lambda: seen or None)
    with pytest.raises(jaxspeed.ConfigError, match="in use by another run"):
        second.take()
    first.check()
    first._closed.set()  # it dies
    first._toucher.join()
    third.take()
    first._closed.clear()
    first._touch()  # it was only slow
    with pytest.raises(jaxspeed.RunError, match="another run took"):
        first.check()
    third.check()
    third.release()
    assert conditions[0] == ["If-None-Match"] and all(conditions), "decided by the server"
    assert s3.objects()[f"runs/a/{claim.LOCK}"] == b""


def test_a_bucket_that_is_not_there_is_not_created(engine, s3):
    for place in ("s3://no-bucket/a", "s3://no-bucket"):
        with pytest.raises(jaxspeed.CheckpointError, match="does not exist"):
            Checkpointer(place).save(engine.program, engine.state)
        with pytest.raises(jaxspeed.ConfigError, match=r"run\.checkpoints: .* does not exist"):
            claim.Claim("run.checkpoints", store_at(place)).take()


def test_requests_are_signed_by_the_profile(s3, monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=NO\naws_secret_access_key=b\n"
        "[of-a-team]\naws_access_key_id=OFTHETEAM\naws_secret_access_key=b\n"
    )
    (tmp_path / "config").write_text("[profile of-a-team]\nregion=us-east-1\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "of-a-team")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    signatures = []

    def noted(handler):
        signatures.append(handler.headers["Authorization"])
        handler.pass_on()

    s3.fault = lambda *_: noted
    owner = claim.Claim("run.checkpoints", store_at(URL))
    owner.take()
    owner.release()
    assert all("Credential=OFTHETEAM/" in signature for signature in signatures)


def test_an_error_has_no_credentials(engine, s3, caplog):
    def refuse(handler):
        handler.rfile.read(handler.length)
        key = faults.KEYS["AWS_ACCESS_KEY_ID"]
        body = (
            f"<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>"
        )
        handler.answer(403, [("Content-Type", "application/xml")], body.encode())

    s3.fault = lambda *_: refuse
    said = []
    for ask in (
        lambda: claim.Claim("run.checkpoints", store_at(URL)).take(),
        lambda: Checkpointer(URL).save(engine.program, engine.state),
        lambda: Checkpointer(URL).list(),
    ):
        with pytest.raises(jaxspeed.JaxspeedError) as caught:
            ask()
        said.append(str(caught.value))
    for word in faults.KEYS.values():
        assert word == "us-east-1" or not any(word in text for text in [*said, caplog.text])


# -- faults ---------------------------------------------------------------------------------------


class Once:
    """A fault of the first requests of this method whose path has a part, `times` of them."""

    def __init__(self, fault, part, times=1, method="PUT"):
        self.fault, self.part, self.left, self.method = fault, part, times, method
        self.happened = 0

    def __call__(self, method, path):
        if method != self.method or self.part not in path or self.happened >= self.left:
            return None
        self.happened += 1
        return self.fault


@pytest.fixture
def impatient(monkeypatch):
    """Retried a few times, within a second."""
    monkeypatch.setitem(object_storage._RETRIES, "max_retries", 3)
    monkeypatch.setitem(object_storage._RETRIES, "max_delay", "500ms")


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["/arrays/ocdbt.process_0/d/", "/arrays/manifest", NAME, "GET"])
@pytest.mark.parametrize("fault", ["broken", "unavailable", "slow"])
def test_a_short_fault_is_retried_and_the_save_succeeds(engine, s3, caplog, part, fault):
    method, part = ("GET", "/d/") if part == "GET" else ("PUT", part)
    s3.fault = once = Once(getattr(faults, fault), part, 2, method)
    expected, saver = states.held(engine), Checkpointer(URL)
    saver.save(engine.program, engine.state, tag="a")
    saver.wait()
    assert once.happened == 2 or (fault == "slow" and once.happened)
    engine.state = saver.restore(engine.program).state
    states.assert_same(states.held(engine), expected)
    assert faults.SECRET not in caplog.text


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["/arrays/", NAME])
@pytest.mark.parametrize("fault", ["broken", "unavailable"])
def test_a_lasting_fault_is_one_error_and_the_earlier_checkpoint_is_restored(
    engine, s3, impatient, capfd, part, fault
):
    expected, saver = states.held(engine), Checkpointer(URL)
    saver.save(engine.program, engine.state, tag="a")
    saver.wait()
    s3.fault = Once(getattr(faults, fault), f"/b/{part.lstrip('/')}", 10**9)
    states.steps(engine, 0, 1)
    begun = time.monotonic()
    saver.save(engine.program, engine.state, tag="b")
    with pytest.raises(jaxspeed.CheckpointError, match=rf"^{URL}: saving failed: ") as caught:
        saver.wait()
    assert time.monotonic() - begun < 60 and len(str(caught.value)) < 400
    s3.fault = lambda *_: None
    engine.state = saver.restore(engine.program).state
    states.assert_same(states.held(engine), expected)
    saver.save(engine.program, engine.state, tag="b")  # over what is left of the failed save
    saver.close()
    assert verify(URL) == [] and {info.tag for info in saver.list() if info.ok} == {"a", "b"}
    said = "".join(capfd.readouterr()) + str(caught.value)
    assert faults.SECRET not in said and "Traceback" not in said


def test_the_lock_is_taken_by_a_request_whose_answer_was_lost(s3):
    s3.fault = once = Once(faults.lost, claim.LOCK)
    owner = claim.Claim("run.checkpoints", store_at(URL))
    owner.take()
    assert once.happened
    owner.release()
