"""Messages between the processes of a run, by the key-value store of JAX's coordination service.

Each process writes a heartbeat under its rank. A *notice* is read by all, in one order: a fault
that ends the run, or a request to stop it. The store is served by process 0, and answers threads
while the main thread waits in a collective (a write and a read of three ranks take 1 ms).

Messages per period: each process writes its heartbeat, reads that of process 0, and waits for the
next notice. Process 0 alone reads all heartbeats. docs/notes/scale.md counts them.
"""

import hashlib
import json
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspeed.checkpoint.process_agreement import answers_of

PREFIX = "jaxspeed/watchdog"
_MOST = 30  # lines of positions
Beat = dict[str, Any]


class Heartbeats:
    """Heartbeats and notices of one run."""

    def __init__(self, client: Any, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._client = client
        self._next = 0  # the notice that is read next

    def write(self, beat: Beat) -> None:
        self._client.key_value_set(
            f"{PREFIX}/beat/{self.rank}", json.dumps(beat), allow_overwrite=True
        )

    def of(self, rank: int) -> Beat | None:
        """The last heartbeat of a process."""
        try:
            beat: Beat = json.loads(self._client.key_value_try_get(f"{PREFIX}/beat/{rank}"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return beat

    def all(self) -> dict[int, Beat]:
        """The last heartbeat of every process that has written one."""
        return self.collected("beat")

    def say(self, subject: str, value: Any) -> None:
        """Write this process's answer to a question that all processes answer."""
        key = f"{PREFIX}/{subject}/{self.rank}"
        self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def collected(self, subject: str) -> dict[int, Any]:
        """The answers so far, by rank."""
        answers = self._client.key_value_dir_get(f"{PREFIX}/{subject}/")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in answers}

    def wait_for_all(
        self, subject: str, seconds: float, absent: Collection[int] = ()
    ) -> dict[int, Any]:
        """The answers of all processes, or of those that have answered within this time."""
        answers = answers_of(self._client, f"{PREFIX}/{subject}", self.count, seconds, absent)
        return {rank: json.loads(text) for rank, text in answers.items()}

    def answer(self, subject: str, value: Any) -> None:
        """Write one answer for all."""
        self._client.key_value_set(f"{PREFIX}/one/{subject}", json.dumps(value))

    def answered(self, subject: str, seconds: float) -> Any:
        """Wait for the one answer."""
        key = f"{PREFIX}/one/{subject}"
        return json.loads(self._client.blocking_key_value_get(key, int(seconds * 1000)))

    def post(self, notice: Mapping[str, Any]) -> None:
        """Append a notice, if there is none of its kind: all may post at once.

        Of two kinds posted at once, both are read, in the same order by all.
        """
        number, text = self._next, json.dumps(notice)
        while True:
            key = f"{PREFIX}/notice/{number}"
            try:
                self._client.key_value_set(key, text)
                return
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise
            if json.loads(self._client.key_value_try_get(key))["kind"] == notice["kind"]:
                return
            number += 1

    def next_notice(self, seconds: float) -> dict[str, Any] | None:
        """The next notice, as soon as it is posted; None after this time."""
        try:
            text = self._client.blocking_key_value_get(
                f"{PREFIX}/notice/{self._next}", max(int(seconds * 1000), 1)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        self._next += 1
        notice: dict[str, Any] = json.loads(text)
        return notice


def where() -> dict[str, Any]:
    """Host and process; `neighbours` is equal where process numbers are comparable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        neighbours = hashlib.sha256(namespace.encode()).hexdigest()[:16]
    except OSError:  # not Linux
        neighbours = ""
    return {"host": socket.gethostname(), "pid": os.getpid(), "neighbours": neighbours}


def has_ended(pid: int) -> bool:
    """Whether a process of this host has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return state in "ZX"


def shown(beats: Mapping[int, Beat], count: int) -> list[str]:
    """Sections and steps of all processes, those in the same one together, as lines."""
    groups: dict[str, list[int]] = {}
    for rank in range(count):
        beat = beats.get(rank)
        at = f", at {beat['at']}" if beat and beat.get("at") else ""
        groups.setdefault(in_section(beat) + at, []).append(rank)
    lines = []
    for section, ranks in groups.items():
        waits = [beats[rank]["seconds"] for rank in ranks if rank in beats]
        took = f", for {min(waits):.0f} to {max(waits):.0f} s" if waits else ""
        lines.append(f"  {_ranks(ranks)}: {section}{took}")
    more = [f"  and {len(lines) - _MOST} more positions"] if len(lines) > _MOST else []
    return lines[:_MOST] + more


def in_section(beat: Beat | None) -> str:
    """`step 12`, or the name of the section and the step after which it began: `user code ...`."""
    if beat is None:
        return "no heartbeat"
    section, step = beat["section"].replace("_", " "), beat["step"]
    if section == "step":
        return f"step {step + 1}"
    return f"{section} after step {step}" if step else str(section)


def _ranks(ranks: list[int]) -> str:
    """`processes 0-3, 6`, of ranks in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"process{'es' * (len(ranks) > 1)} {text}"
