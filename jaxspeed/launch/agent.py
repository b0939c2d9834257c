"""`python -m jaxspeed.launch.agent`: the processes of one host, for a launcher elsewhere.

Started over ssh. The first line of standard input is the job as JSON; each further one is the
number of a signal to pass on. Its end, also by a lost connection, ends the processes. Standard
output has their events, one JSON list in each line.
"""

import json
import signal
import sys
import threading
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from jaxspeed.launch.launch_folder import LaunchFolder
from jaxspeed.launch.local_group import Ended, HostJob, LocalGroup, Output, started

_LOST = None  # in the queue: the launcher has gone


def encoded_job(job: HostJob) -> str:
    return json.dumps(asdict(job))


def decoded_job(text: str) -> HostJob:
    fields = json.loads(text)
    for name in ("command", "slots"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return HostJob(**fields)


def encoded(event: Output | Ended) -> str:
    if isinstance(event, Output):
        return json.dumps(["output", event.rank, event.text, event.error])
    return json.dumps(["ended", *event])


def decoded(line: str) -> Output | Ended:
    """The event of a line.

    Raises:
      ValueError: it is none: a shell's start-up files may print, too.
    """
    try:
        kind, *fields = json.loads(line)
        return {"output": Output, "ended": Ended}[kind](*fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(line) from error


def main() -> None:
    # The launcher passes signals on. Handled, for processes inherit what is ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    job = decoded_job(sys.stdin.readline())
    events: SimpleQueue[Any] = SimpleQueue()
    with LaunchFolder() as folder:
        group = started(job, events, f"{folder}/progress")
        threading.Thread(target=_listen, args=(group, events), daemon=True).start()
        left = job.processes
        try:
            while left and (event := events.get()) is not _LOST:
                left -= isinstance(event, Ended)
                print(encoded(event), flush=True)
        except BrokenPipeError:
            pass
        finally:
            if group is not None:
                group.close()


def _listen(group: LocalGroup | None, events: "SimpleQueue[Any]") -> None:
    for line in sys.stdin:
        if group is not None:
            group.signal(int(line))
    events.put(_LOST)


if __name__ == "__main__":
    main()
