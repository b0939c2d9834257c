"""`tools/python_for` finds an interpreter that works, in a machine made of small scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

PROGRAM = Path(__file__).resolve().parents[1] / "tools" / "python_for"
# The tools that it uses itself, for a PATH without the machine's interpreters.
TOOLS = ("sh", "sort", "cut", "env")
NO_SHIM = "#!/bin/sh\necho 'pyenv: python3: command not found' >&2\nexit 127\n"


def script(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def interpreter(file, version, venv=True):
    """A script that answers as Python of this version: it runs the test's own, which says it is."""
    parts = ", ".join(version.split("."))
    missing = "" if venv else "sys.modules['ensurepip'] = None; "
    before = f"import sys; sys.version_info = ({parts}); {missing}"
    return script(file, f"#!/bin/sh\nexec {sys.executable} -E -S -c \"{before}\nexec('''$2''')\"\n")


class Machine:
    """A PATH, pyenv's root and a home of their own."""

    def __init__(self, folder):
        self.bin, self.pyenv, self.home = folder / "bin", folder / "pyenv root", folder / "home"
        self.bin.mkdir()
        self.home.mkdir()
        for tool in TOOLS:
            where = next(p for p in ("/bin", "/usr/bin") if Path(p, tool).exists())
            (self.bin / tool).symlink_to(Path(where, tool))

    def pyenv_version(self, name, version=None):
        return interpreter(self.pyenv / "versions" / name / "bin" / "python", version or name)

    def find(self, *wanted):
        """(exit status, stdout, stderr)."""
        env = {"PATH": str(self.bin), "HOME": str(self.home), "PYENV_ROOT": str(self.pyenv)}
        done = subprocess.run(
            [PROGRAM, *wanted], env=env, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def chosen(version, path):
    return 0, f"{path}\n", f"Python {version}: {path}\n"


def test_python3_is_taken_if_it_is_new_enough(machine):
    own = interpreter(machine.bin / "python3", "3.13.2")
    interpreter(machine.bin / "python3.14", "3.14.0")
    assert machine.find() == chosen("3.13.2", own)


def test_an_older_python3_is_passed_over_for_the_newest_by_name(machine):
    interpreter(machine.bin / "python3", "3.11.7")
    interpreter(machine.bin / "python3.12", "3.12.1")
    own = interpreter(machine.bin / "python3.13", "3.13.0")
    assert machine.find() == chosen("3.13.0", own)


def test_a_shim_that_does_not_run_is_passed_over(machine):
    script(machine.bin / "python3", NO_SHIM)
    script(machine.bin / "python3.14", NO_SHIM)
    own = interpreter(machine.bin / "python3.12", "3.12.1")
    assert machine.find() == chosen("3.12.1", own)


def test_one_that_cannot_make_a_venv_is_passed_over(machine):
    interpreter(machine.bin / "python3", "3.13.2", venv=False)
    own = interpreter(machine.bin / "python3.12", "3.12.1")
    assert machine.find() == chosen("3.12.1", own)


def test_the_lowest_suitable_version_of_pyenv_is_taken(machine):
    interpreter(machine.bin / "python3", "3.11.7")
    for version in ("3.14.0", "3.9.18", "3.13.10", "3.13.9", "2.7.18"):
        machine.pyenv_version(version)
    assert machine.find() == chosen("3.13.9", machine.pyenv / "versions/3.13.9/bin/python")


def test_pyenv_is_in_the_home_folder_without_its_variable(machine):
    machine.pyenv = machine.home / ".pyenv"
    own = machine.pyenv_version("3.12.1")
    env = {"PATH": str(machine.bin), "HOME": str(machine.home)}
    done = subprocess.run([PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{own}\n"


def test_a_broken_version_of_pyenv_is_passed_over(machine):
    script(machine.pyenv / "versions" / "3.12.1" / "bin" / "python", NO_SHIM)
    own = machine.pyenv_version("3.13.0")
    assert machine.find() == chosen("3.13.0", own)


def test_uv_s_is_taken_where_there_is_no_other(machine):
    interpreter(machine.bin / "python3", "3.11.7")
    own = interpreter(machine.home / "uv" / "python", "3.12.9")
    asked = machine.home / "asked"
    script(machine.bin / "uv", f"#!/bin/sh\necho \"$*\" >> {asked}\necho '{own}'\n")
    assert machine.find() == chosen("3.12.9", own)
    assert asked.read_text() == "python find --no-python-downloads >=3.12\n"


def test_uv_installs_nothing(machine):
    asked = machine.home / "asked"
    script(machine.bin / "uv", f'#!/bin/sh\necho "$2" >> {asked}\nexit 2\n')
    status, found, said = machine.find()
    assert (status, found) == (1, "")
    assert "uv python install 3.12" in said
    assert asked.read_text() == "find\n"


def test_without_any_one_line_says_what_to_install(machine):
    interpreter(machine.bin / "python3", "3.11.7")
    machine.pyenv_version("3.10.13")
    status, found, said = machine.find()
    assert (status, found) == (1, "")
    assert said.count("\n") == 1
    assert said.startswith("no Python 3.12 or newer that runs and can make a venv: install one")


def test_a_minor_version_is_the_only_one_that_counts(machine):
    interpreter(machine.bin / "python3", "3.13.2")
    interpreter(machine.bin / "python3.13", "3.13.2")
    machine.pyenv_version("3.13.0")
    own = machine.pyenv_version("3.12.1")
    assert machine.find("3.12") == chosen("3.12.1", own)
    python3 = machine.bin / "python3.12"
    interpreter(python3, "3.12.4")
    assert machine.find("3.12") == chosen("3.12.4", python3)


def test_a_minor_version_may_be_python3(machine):
    own = interpreter(machine.bin / "python3", "3.12.2")
    assert machine.find("3.12") == chosen("3.12.2", own)


def test_a_minor_version_that_is_absent(machine):
    interpreter(machine.bin / "python3", "3.13.2")
    status, found, said = machine.find("3.12")
    assert (status, found) == (1, "")
    assert said.startswith("no Python 3.12 that runs")


@pytest.mark.parametrize("wanted", ["3", "3.12.1", "x'; print(1)"])
def test_what_is_no_minor_version_is_refused(machine, wanted):
    interpreter(machine.bin / "python3", "3.12.2")
    status, found, said = machine.find(wanted)
    assert (status, found) == (2, "")
    assert "is no minor version" in said


def test_this_machine_has_one():
    done = subprocess.run([PROGRAM], capture_output=True, text=True, check=True)
    python = done.stdout.strip()
    newer = [python, "-c", "import sys, venv, ensurepip; print(sys.version_info >= (3, 12))"]
    assert subprocess.run(newer, capture_output=True, text=True).stdout == "True\n"
    assert os.path.isabs(python)
