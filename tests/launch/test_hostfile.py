"""DeepSpeed's hostfile, its filters and `.deepspeed_env`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.errors import ConfigError
from jaxspeed.launch.agent import decoded, decoded_job, encoded, encoded_job
from jaxspeed.launch.hostfile import exported_environment, read_hostfile, selected
from jaxspeed.launch.local_group import Ended, HostJob, Output
from jaxspeed.launch.remote_group import coordinator_host, is_here

pytestmark = pytest.mark.fast

HOSTS = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3), "worker-2": (0, 1)}


def read(tmp_path, text):
    file = tmp_path / "hostfile"
    file.write_text(text)
    return read_hostfile(file)


def test_lines_comments_and_blanks(tmp_path):
    text = "# a pool\n\nworker-0 slots=4\n  worker-1\tslots=4  # the second\nworker-2 slots=2 x=1\n"
    assert read(tmp_path, text) == HOSTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no host"),
        ("# none\n", "lists no host"),
        ("a slots=2\nb 4\n", ':2: "b 4"; needs HOST slots=NUMBER'),
        ("a slots=many\n", "needs HOST slots=NUMBER"),
        ("a slots=2\n\na slots=3\n", ":3: a is listed twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, text)


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        # the examples of DeepSpeed's documentation
        ("include", "worker-0@worker-1:0,2", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("exclude", "worker-1:0", HOSTS | {"worker-1": (1, 2, 3)}),
        # the hostfile's order, each slot once
        ("include", "worker-2:1,0,1@worker-0:3", {"worker-0": (3,), "worker-2": (0, 1)}),
        ("include", "worker-1:2@worker-1:0", {"worker-1": (0, 2)}),
        ("exclude", "worker-0@worker-1", {"worker-2": (0, 1)}),
        ("exclude", "worker-2:0,1", {h: HOSTS[h] for h in ("worker-0", "worker-1")}),
        ("include", "", HOSTS),
    ],
)
def test_hosts_and_slots_are_selected(option, text, expected):
    found = selected(HOSTS, **{option: text})
    assert found == expected and list(found) == [host for host in HOSTS if host in expected]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"include": "worker-9"}, "no host worker-9"),
        ({"include": "worker-2:2"}, "no slot 2 on worker-2"),
        ({"exclude": "worker-0:x"}, "needs HOST"),
        ({"exclude": "worker-0@worker-1@worker-2"}, "no slot remains"),
        ({"include": "worker-0", "exclude": "worker-1"}, "only one of them"),
    ],
)
def test_a_bad_selection_is_named(options, said):
    with pytest.raises(ConfigError, match=said):
        selected(HOSTS, **options)


@given(st.dictionaries(st.sampled_from(sorted(HOSTS)), st.sets(st.integers(0, 1), min_size=1)))
def test_what_is_excluded_is_what_the_rest_includes(slots):
    text = "@".join(f"{host}:{','.join(map(str, of))}" for host, of in slots.items())
    if not text:
        return
    left = selected(HOSTS, exclude=text)
    kept = "@".join(f"{host}:{','.join(map(str, of))}" for host, of in left.items())
    assert selected(HOSTS, include=kept) == left
    assert all(set(left.get(h, ())) == set(HOSTS[h]) - slots.get(h, set()) for h in HOSTS)


def test_variables_of_the_environment_file(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=1\nB=2\n"), (here, "# note\nB=x=y\n\nC=3\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = exported_environment((home, here))
    assert {name: found[name] for name in "ABC"} == {"A": "1", "B": "x=y", "C": "3"}
    assert found["NCCL_DEBUG"] == "INFO" and "HOME" not in found
    (here / ".deepspeed_env").write_text("nothing\n")
    with pytest.raises(ConfigError, match="needs NAME=VALUE"):
        exported_environment((here,))


def test_the_coordinator_is_where_the_others_reach_it():
    assert coordinator_host(["10.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert coordinator_host(["127.0.0.1", "127.0.0.2"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot be reached from 10"):
        coordinator_host(["127.0.0.1", "10.0.0.2"])
    assert is_here("localhost") and not is_here("127.0.0.1")


def test_jobs_and_events_survive_the_connection():
    job = HostJob(("a", "b"), 2, 4, "h:1", first=2, slots=(0, 3), environment={"A": "1"})
    assert decoded_job(encoded_job(job)) == job
    for event in (Output(3, "zwölf", True), Ended(1, -9, 1.5, 20)):
        assert decoded(encoded(event)) == event
    for line in ("Welcome!", "[]", '["other", 1]', "7", '["ended"]'):
        with pytest.raises(ValueError):
            decoded(line)
