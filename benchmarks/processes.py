"""What grows how with the processes of a run: messages, bytes, files, memory, compilations.

`python benchmarks/processes.py [COUNT...]` trains one small config on 16 simulated devices in 1, 2,
4, 8 and 16 processes, and counts. Then it fills the coordination service with the messages of
10,000 processes that are not there. docs/notes/scale.md has the figures.
"""

import collections
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

DEVICES, STEPS, EVERY = 16, 12, 4
SAVES = STEPS // EVERY
CONFIG = {
    "run": {
        "devices": f"cpu:{DEVICES}",
        "steps": STEPS,
        "checkpoint_every": EVERY,
        "sample_tokens": 0,
        "eval_batches": 1,
    },
    "model": {
        "family": "gpt2",
        "config": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 32,
        },
    },
    "data": {"source": "text", "path": "corpus.txt", "held_out": 0.05},
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
Counts = dict[str, list[int]]  # subject: messages, bytes sent, bytes received


class CountingClient:
    """JAX's client of the coordination service, which counts messages and bytes by subject."""

    def __init__(self, client: Any) -> None:
        self._client, self.phase = client, "start"
        self.counts: Counts = collections.defaultdict(lambda: [0, 0, 0])

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if not callable(call):
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            count = self.counts[self._subject(name, str(args[0]) if args else "")]
            count[0] += 1
            count[1] += sum(len(x) for x in args if isinstance(x, str))
            found = call(*args, **kwargs)
            if isinstance(found, str):
                count[2] += len(found)
            elif isinstance(found, list):
                count[2] += sum(len(key) + len(text) for key, text in found)
            return found

        return counted

    def _subject(self, method: str, key: str) -> str:
        if "/beat/" in key:
            return "heartbeats"
        if "/notice/" in key:
            return "notices"
        if "barrier" in method:
            return "barriers"
        return self.phase


def child(config: str, output: str) -> None:
    """One process: trains, and writes what it counted."""
    opened: collections.Counter[str] = collections.Counter()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            opened["code" if args[0].endswith((".py", ".pyc", ".so")) else "other"] += 1

    sys.addaudithook(hook)
    import jax
    from jax._src import distributed

    from jaxspeed.checkpoint import process_agreement
    from jaxspeed.cli import main
    from jaxspeed.data.split import Split
    from jaxspeed.run import start, trainer

    events: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.update([name])
    )
    clients = []
    samples = [0]
    batch, meet, run = Split.batch, start.meet, trainer.Trainer.run

    def counted_meet(watchdog: Any, facts: Any) -> None:
        client = CountingClient(distributed.global_state.client)
        clients.append(client)
        watchdog.beats._client = client
        process_agreement._client = lambda: client  # type: ignore[assignment]
        meet(watchdog, facts)
        client.phase = "opening"

    def counted_run(self: Any) -> Any:
        for client in clients:
            client.phase = "saves"
        return run(self)

    def counted_batch(self: Any, step: int, size: int, rows: Any = None) -> Any:
        if clients or jax.process_count() == 1:
            samples[0] += len(self.sample_ids(step, size, rows))
        return batch(self, step, size, rows)

    start.meet, trainer.Trainer.run, Split.batch = counted_meet, counted_run, counted_batch
    began = time.monotonic()
    code = main(["train", config])
    status = Path("/proc/self/status").read_text()
    Path(f"{output}-{jax.process_index()}.json").write_text(
        json.dumps(
            {
                "counts": clients[0].counts if clients else {},
                "seconds": time.monotonic() - began,
                "opened": opened,
                "samples": samples[0],
                "rss": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
                "compiled": events["/jax/core/compile/backend_compile_duration"],
                "hits": events["/jax/compilation_cache/cache_hits"],
            }
        )
    )
    sys.exit(code)


# -- one run ---------------------------------------------------------------------------------------


class Relay:
    """Passes connections on to a port, and counts their bytes in both directions."""

    def __init__(self, port: int) -> None:
        self._to, self.bytes, self.connections = port, [0, 0], 0
        self._server = socket.create_server(("localhost", 0), backlog=64)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            one = self._server.accept()[0]
            try:
                other = socket.create_connection(("localhost", self._to))
            except OSError:
                one.close()
                continue
            self.connections += 1
            for pair, direction in (((one, other), 0), ((other, one), 1)):
                threading.Thread(target=self._pass_on, args=(*pair, direction), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, direction: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.bytes[direction] += len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def measured(count: int) -> dict[str, Any]:
    """One run in `count` processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("\n".join(f"line {i} of {i * i}" for i in range(20000)))
        config = json.loads(json.dumps(CONFIG))
        config["data"]["path"] = str(folder / "corpus.txt")
        config["run"]["output"] = str(folder / "run")
        config["run"]["compilation_cache"] = str(folder / "cache")
        (folder / "config.json").write_text(json.dumps(config))
        port = free_port()
        relay = Relay(port)
        runs = []
        for rank in range(count):
            own = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
            if count > 1:
                address = f"localhost:{relay.port if rank else port}"
                own |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": str(rank)}
                own["JAX_NUM_PROCESSES"] = str(count)
            command = [sys.executable, __file__, "--child", str(folder / "config.json")]
            with (folder / f"output-{rank}").open("wb") as out:
                runs.append(
                    subprocess.Popen([*command, str(folder / "c")], env=own, stdout=out, stderr=out)
                )
        codes = [run.wait() for run in runs]
        if any(codes):
            raise SystemExit("\n".join((folder / f"output-{i}").read_text() for i in range(count)))
        found = [json.loads((folder / f"c-{i}.json").read_text()) for i in range(count)]
        newest = max((folder / "run" / "checkpoints").glob("step-*"))
        files = [path for path in newest.rglob("*") if path.is_file()]
        caches = list((folder / "cache").rglob("*-cache"))
        return {
            "processes": found,
            "relay": relay.bytes,
            "connections": relay.connections,
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
            "manifest": (newest / "manifest.json").stat().st_size,
            "caches": len(caches),
        }


def report(count: int, result: dict[str, Any]) -> None:
    found = result["processes"]

    def total(subject: str, of: list[dict[str, Any]], column: int) -> int:
        return sum(one["counts"].get(subject, [0, 0, 0])[column] for one in of)

    first, rest = found[:1], found[1:] or found
    print(f"{count} processes, {max(one['seconds'] for one in found):.0f} s")
    for subject, times in (
        ("start", 1),
        ("opening", 1),
        ("saves", SAVES),
        ("barriers", 1),
        ("heartbeats", 1),
        ("notices", 1),
    ):
        if count > 1:
            others = [total(subject, rest, i) / (count - 1) / times for i in range(3)]
            own = [total(subject, first, i) / times for i in range(3)]
            print(
                f"  {subject:<11} process 0: {own[0]:6.1f} messages {own[1]:7.0f} B out "
                f"{own[2]:8.0f} B in; others, each: {others[0]:6.1f} {others[1]:7.0f} "
                f"{others[2]:7.0f}"
            )
    sent, received = result["relay"]
    share = max(count - 1, 1)
    print(
        f"  on the port: {result['connections']} connections, to process 0 {sent:,} B "
        f"({sent / share:,.0f} each), from it {received:,} B ({received / share:,.0f} each)"
    )
    print(
        f"  checkpoint: {result['files']} files, {result['bytes']:,} B, manifest "
        f"{result['manifest']:,} B"
    )
    print(
        f"  RSS: process 0 {found[0]['rss']:.0f} MiB, others "
        f"{sum(one['rss'] for one in rest) / len(rest):.0f} MiB; samples read per process: "
        f"{sorted({one['samples'] for one in found})}; opened: {found[0]['opened']}, "
        f"{rest[-1]['opened']}"
    )
    print(
        f"  compilations: {[one['compiled'] for one in found]}, from the cache "
        f"{[one['hits'] for one in found]}; {result['caches']} entries",
        flush=True,
    )


# -- the messages of processes that are not there --------------------------------------------------


def coordinator(count: int) -> None:
    """Bytes and seconds of process 0 for the heartbeats and agreements of so many processes."""
    import jax
    from jax._src import distributed

    from jaxspeed.checkpoint.process_agreement import GROUP, answers_of
    from jaxspeed.config.run_sections import WatchdogSection
    from jaxspeed.run.heartbeats import Heartbeats, shown
    from jaxspeed.run.watchdog import Watchdog

    def rss() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    jax.distributed.initialize(f"localhost:{free_port()}", 1, 0)
    client = distributed.global_state.client
    before = rss()
    watchdog = Watchdog(WatchdogSection(), Heartbeats(client, 0, count))
    for rank in range(count):
        Heartbeats(client, rank, count).write(watchdog.beat())
    began = time.perf_counter()
    beats = watchdog.beats.all()  # type: ignore[union-attr]
    read = time.perf_counter() - began
    assert len(beats) == count
    text = json.dumps(watchdog.beat())
    began = time.perf_counter()
    shown(beats, count)
    grouped = time.perf_counter() - began
    for rank in range(count):
        client.key_value_set(f"jaxspeed/x/of/{rank}", '{"result": null}')
    began = time.perf_counter()
    assert len(answers_of(client, "jaxspeed/x/of", count, 10.0)) == count
    gathered = time.perf_counter() - began
    began = time.perf_counter()
    for group in range(-(-count // GROUP)):
        client.key_value_set(f"jaxspeed/x/items/{group}", "x" * 400 * GROUP)
    shared = time.perf_counter() - began
    print(
        f"{count} processes: a heartbeat has {len(text)} B; reading all takes {read:.3f} s, "
        f"grouping them {grouped:.3f} s; an agreement {gathered:.3f} s; sharing files out "
        f"{shared:.3f} s; memory {rss() - before:.1f} MiB"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    elif sys.argv[1:2] == ["--coordinator"]:
        coordinator(int(sys.argv[2]))
    else:
        for count in map(int, sys.argv[1:] or (1, 2, 4, 8, 16)):
            report(count, measured(count))
        for count in (100, 1000, 10_000):
            subprocess.run([sys.executable, __file__, "--coordinator", str(count)], check=True)
