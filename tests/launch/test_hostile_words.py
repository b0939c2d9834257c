"""Names, hosts and options that would be commands of a shell never run anything."""

import os
import shutil
import subprocess
import sys
from queue import SimpleQueue

import pytest

from jaxspeed.cli.main import main
from jaxspeed.errors import ConfigError, ExitCode
from jaxspeed.launch.hostfile import read_hostfile
from jaxspeed.launch.local_group import HostJob
from jaxspeed.launch.remote_group import RemoteGroup
from tests.support.covering import covering

pytestmark = pytest.mark.fast

# `ran` is a program on PATH that leaves a file.
HOSTILE = (
    "$(ran)", "`ran`", "${x:-$(ran)}", "$(ran", "`ran", "a$(ran)b", "a`ran`b", "$((`ran`))",
    "'$(ran)'", "\"$(ran)\"", "'; ran; '", '"; ran; "', "'\"; ran; \"'", "\\'; ran; \\'",
    '\\"; ran; \\"', "'`ran`'", "\"`ran`\"", "a' 'ran", "'$(ran)", '"$(ran)',
    "; ran", ";ran;", "a; ran", "a && ran", "a || ran", "| ran", "a | ran", "& ran", "a & ran &",
    "> x; ran", "< /dev/null ran", "<(ran)", ">(ran)", "(ran)", "{ ran; }", "a # '\nran",
    "\nran", "a\nran\n", "a\r\nran\r\n", "'\nran\n'", '"\nran\n"', "\\\nran", "a\x0bran\x0c",
    "-oProxyCommand=ran", "--", "-x ran", "--rsh=ran", "-e$(ran)",
    "é$(ran)", "\u2028ran\u2028", "‘$(ran)’", "\u202e$(ran)", "a\u00a0;\u00a0ran", "*", "~ran",
    "!ran", "%h;ran", "a@-oProxyCommand=ran", "a@$(ran)", "host$IFS;ran",
)  # fmt: skip
assert len(HOSTILE) >= 50
WHERE = ("name", "option", "logs", "cache", "command")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder of stubs of the schedulers' programs, which end at once, and of `ran`."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("srun", "squeue", "scontrol", "mpirun", "ssh", "ran"):
        code = f"touch {folder}/has-run" if name == "ran" else "exit 3"
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    # As Ray's `ray job submit`: the words after -- become a line of a shell.
    join = "import subprocess, sys; print(subprocess.list2cmdline(sys.argv[1:]))"
    (folder / "ray").write_text(
        '#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done; shift\n'
        f"exec sh -c \": $('{sys.executable}' -c '{join}' \"$@\")\"\n"
    )
    for file in folder.iterdir():
        file.chmod(0o755)
    return folder


def ran(shelf):
    """Whether something has run since the last question."""
    file = shelf / "has-run"
    found = file.exists()
    file.unlink(missing_ok=True)
    return found


def printed(capsys, on, where, word):
    """The script of a job with the word, or None if the word is refused."""
    command = ["train", "configs/tiny.yaml", *([word] if where == "command" else [])]
    option = [f"--{where}={word}"] if where != "command" else []
    code = main(["launch", "--on", on, "--print", "--processes", "2", *option, "--", *command])
    out, err = capsys.readouterr()
    if code == 0:
        return out
    assert code == ExitCode.CONFIG and err.startswith("error: ") and "Traceback" not in err
    return None


CASES = covering(
    [(on, i) for on in ("slurm", "mpi", "ray") for i in range(len(HOSTILE))],
    [(on, i) for k, on in enumerate(("slurm", "mpi", "ray")) for i in range(k, len(HOSTILE), 3)],
)


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize(("on", "i"), CASES)
def test_a_script_with_a_hostile_word_runs_nothing(on, i, shelf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{shelf}:{os.environ['PATH']}")
    for where in WHERE:
        script = printed(capsys, on, where, HOSTILE[i])
        assert (script is None) or where != "name", "a name is letters, digits, '.', '_' and '-'"
        if script is None:
            assert where != "command"
            continue
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=60)
        assert not ran(shelf), f"{HOSTILE[i]!r} as {where} of {on} has run"


def test_the_stubs_see_what_runs(shelf, tmp_path, monkeypatch):
    """The test above can fail, for Ray too, whose words a shell reads twice."""
    monkeypatch.setenv("PATH", f"{shelf}:{os.environ['PATH']}")
    for script in ("echo $(ran)", "ray job submit -- python -c '$(ran)'"):
        subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=tmp_path)
        assert ran(shelf)


@pytest.mark.parametrize("on", ["slurm", "mpi", "ray"])
def test_scripts_pass_shellcheck(on, tmp_path, monkeypatch, capsys):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    monkeypatch.chdir(tmp_path)
    for where, word in [("name", "a.b-c_1"), *((where, "it's $(a) `b`") for where in WHERE[1:])]:
        script = printed(capsys, on, where, word)
        # 2016: nothing expands in single quotes, which is what quoting is for.
        command = ["shellcheck", "--severity=style", "--exclude=SC2016", "--shell=bash", "-"]
        done = subprocess.run(command, input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


def test_a_hostile_host_is_refused(tmp_path):
    for word in HOSTILE:
        host = "".join(word.split()) or "-"  # a line of the file has words
        if host not in ("ran", "aran"):
            (tmp_path / "hosts").write_text(f"{host} slots=1\n")
            with pytest.raises(ConfigError, match="is no host"):
                read_hostfile(tmp_path / "hosts")
            options = ["--processes", "1", f"--coordinator={host}"]
            assert main(["launch", *options, "--", "true"]) == ExitCode.CONFIG


def test_names_and_addresses_are_hosts(tmp_path):
    hosts = ("worker-0", "a.b.c", "10.0.0.1", "[::1]", "fe80::1%eth0", "me@worker", "node_1")
    (tmp_path / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
    assert tuple(read_hostfile(tmp_path / "hosts")) == hosts


def test_ssh_is_told_where_its_options_end(tmp_path):
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    (tmp_path / "ssh").chmod(0o755)
    job = HostJob(("true",), 1, 1, "", folder=str(tmp_path / "it's; ran"))
    RemoteGroup({"far": job}, SimpleQueue(), f"{tmp_path}/ssh -p 22").close()
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["-p", "22", "--", "far"]
    for bad in ("", "ssh 'x"):
        with pytest.raises(ConfigError, match="--ssh"):
            RemoteGroup({"far": job}, SimpleQueue(), bad)


@pytest.mark.parametrize("words", [("--processes", "9" * 12), ("--grace", "nan")])
def test_numbers_are_bounded(words, capsys):
    with pytest.raises(SystemExit):
        main(["launch", *words, "--", "true"])
    assert "needs at " in capsys.readouterr().err


@pytest.mark.parametrize("slots", ["9" * 12, "9" * 5000])
def test_slots_are_bounded(tmp_path, slots):
    (tmp_path / "hosts").write_text(f"a slots={slots}\n")
    with pytest.raises(ConfigError, match="needs at most 4096"):
        read_hostfile(tmp_path / "hosts")
