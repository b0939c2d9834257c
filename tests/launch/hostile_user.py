"""A program of another user of the host, which connects to all that a launch listens at.

`python -m tests.launch.hostile_user PID` becomes user 65534, finds the sockets of the launcher PID
and of its processes until they end, and prints each one and what it could do there.
"""

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534
PAUSE = 0.05
HELD = 300  # open connections


def garbage() -> list[bytes]:
    """What is sent; the first waits. None begins with a small number, as Gloo's connections do."""
    draw = random.Random(0)
    return [
        b"",
        draw.randbytes(64),
        draw.randbytes(100_000),
        b'{"rank": 1, "count": 2, "host": "h"}\n',
        b'{"rank": Infinity}\n',
        b"[" * 4000 + b"\n",
        b"a" * 5000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(200),
        b"GET / HTTP/1.1\r\n\r\n",
    ]


def tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from tree(int(child))


def inodes(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    found.add(name.removeprefix("socket:[").removesuffix("]"))
    return found


def listening(pids: list[int]) -> Iterator[str]:
    """HOST:PORT and unix:PATH of all that the processes listen at."""
    own = inodes(pids)
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                yield f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[3] == "00010000" and fields[6] in own:
            yield f"unix:{fields[7]}"


def attack(address: str, held: list[socket.socket]) -> str:
    """What became of it."""
    if address.startswith("unix:"):
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(address.removeprefix("unix:"))
        except OSError as error:
            return error.strerror or str(error)
        return "connected"
    host, _, port = address.rpartition(":")
    for sent in garbage():
        with contextlib.suppress(OSError):
            peer = socket.create_connection((host, int(port)), timeout=1)
            held.append(peer)
            peer.setblocking(False)
            peer.send(sent)
    while len(held) > HELD:
        held.pop(0).close()
    return "connected"


def main() -> None:
    """As two processes: who may read the launcher's descriptors, and the hostile user."""
    launcher = int(sys.argv[1])
    socket.getaddrinfo("127.0.0.1", 1)  # imports what that user may not be able to read
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(theirs)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        held: list[socket.socket] = []
        with open(ours, buffering=1) as addresses:
            for address in map(str.strip, addresses):
                print(address, attack(address, held), sep="\t", flush=True)
        return
    os.close(ours)
    with open(theirs, "w", buffering=1) as told, contextlib.suppress(BrokenPipeError):
        while Path(f"/proc/{launcher}").exists():
            for address in set(listening(list(tree(launcher)))):
                told.write(f"{address}\n")
            time.sleep(PAUSE)
    os.wait()


if __name__ == "__main__":
    main()
