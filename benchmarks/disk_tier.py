"""Training with the optimizer's state on a disk: memory, time by phase, and the disk's own speed.

    python benchmarks/disk_tier.py FOLDER [--layers 36] [--width 2560] [--steps 2] [--json]

By default a Llama of 3 billion parameters in bf16 on one device: 36 GB of masters and moments, two
steps of one micro-batch with full remat. A child process trains; this one adds up the memory of it
and of its children (RssAnon and RssShmem) ten times a second. The disk's own speed is measured with
direct I/O before and after: by `dd`, by `fio` where it is installed, and by `measure_disk`, which
gives the seconds of a plan with `--disk FOLDER`. With `--compare` a config of two layers is trained
on the disk and with its buckets in memory, and the parameters are compared bit by bit.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HEAD, TOKENS = 128, 32  # elements of a head, tokens of a sample


def settings(folder: str, bucket: int, buffers: int) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "parallel": {"remat": "full"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "sub_group_size": bucket,
            "offload_optimizer": {"device": "nvme", "nvme_path": folder, "buffer_count": buffers},
        },
        "run": {"devices": "cpu:1"},
    }


class Buckets:
    """A file in memory, for the same buckets."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self.bytes = np.zeros(nbytes, np.uint8)

    def read(self, offset: int, buffer: Any) -> "Buckets":
        buffer[:] = self.bytes[offset : offset + buffer.nbytes]
        return self

    def write(self, offset: int, buffer: Any) -> "Buckets":
        self.bytes[offset : offset + buffer.nbytes] = buffer
        return self

    def wait(self) -> tuple[float, float]:
        return time.perf_counter(), time.perf_counter()

    def seal(self) -> None:
        """No-op: nobody else writes to it."""

    def refuse_changed(self) -> None:
        """No-op, for the same reason."""


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and return what happened."""
    import jax
    import numpy as np

    from jaxspeed import models
    from jaxspeed.config import Config
    from jaxspeed.engine import Engine
    from jaxspeed.train.build import build_program

    sizes = {
        "hidden_size": args.width,
        "intermediate_size": args.width * 27 // 10 // 64 * 64,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.width // HEAD,
        "num_key_value_heads": args.width // HEAD,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": TOKENS,
        "initializer_range": 0.006,  # for a first loss near ln(vocabulary)
    }
    model, loss, *_ = models.build("llama", overrides=sizes)
    config = Config.load(settings(args.folder, args.bucket, args.buffers))
    program = build_program(config, model, loss, devices=jax.devices()[:1])
    if args.in_memory:
        program.update.tier._file = Buckets(program.update.tier.nbytes)
    start = time.perf_counter()
    engine = Engine(program, program.init(0))
    begun, steps, rng = time.perf_counter() - start, [], np.random.default_rng(0)
    print(f"initialized in {begun:.1f} s", flush=True)  # from here on it trains
    for _ in range(args.steps):
        tokens = rng.integers(0, args.vocabulary, (1, TOKENS + 1), np.int32)
        start = time.perf_counter()
        metrics = {name: float(x) for name, x in engine.train_batch({"tokens": tokens}).items()}
        steps.append({"seconds": time.perf_counter() - start, **metrics})
        print(f"a step in {steps[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    digest = hashlib.sha256()
    for name in sorted(program.update.tier.arrays) if args.compare else ():
        digest.update(np.asarray(program.update.tier.arrays[name]).tobytes())
    return {
        "parameters": sum(math.prod(row.leaf.shape) for row in program.table),
        "file_bytes": program.update.tier.nbytes,
        "buffer_bytes": program.update.tier.buffer_bytes,
        "initialized_seconds": begun,
        "steps": steps,
        "state_hash": digest.hexdigest() if args.compare else None,
    }


def in_child(args: argparse.Namespace, **changed: Any) -> dict[str, Any]:
    """`train` in a child process, with the peak memory of it and of its children."""
    options = {**vars(args), **changed}
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    peaks, done = [0, 0], threading.Event()
    trains = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            now = sum(map(anonymous_bytes, processes_of(child.pid)))
            peaks[trains.is_set()] = max(peaks[trains.is_set()], now)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert child.stdout is not None
    print(child.stdout.readline(), end="", file=sys.stderr)
    trains.set()
    printed, _ = child.communicate()
    done.set()
    watcher.join()
    if child.returncode:
        raise SystemExit(f"the child ended with {child.returncode}")
    initializing, training = peaks
    return {
        **json.loads(printed),
        "peak_bytes": max(peaks),
        "initializing_bytes": initializing,
        "training_bytes": training,
    }


def processes_of(root: int) -> list[int]:
    """A process and all its descendants."""
    found = [root]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended
                continue
    return found


def anonymous_bytes(process: int) -> int:
    """RssAnon + RssShmem: not the page cache, nor mapped libraries."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return sum(1024 * int(x[1]) for x in lines if x and x[0] in ("RssAnon:", "RssShmem:"))


def disk_speeds(folder: str) -> dict[str, list[float]]:
    """Bytes a second of direct I/O: reading, writing and, but for `dd`, both at once."""
    from jaxspeed.disk.measure import measure_disk

    speeds = {"dd": dd(folder), "measure_disk": list(measure_disk(folder)[:3])}
    return speeds | ({"fio": fio(folder)} if shutil.which("fio") else {})


def dd(folder: str, megabytes: int = 1024) -> list[float]:
    """By `dd`, one request at a time."""
    path, speeds = Path(folder) / "disk_tier_dd", {}
    count = f"count={megabytes // 16}"
    for name, ends in {
        "write": ("if=/dev/zero", f"of={path}", "oflag=direct"),
        "read": (f"if={path}", "of=/dev/null", "iflag=direct"),
    }.items():
        start = time.perf_counter()
        subprocess.run(["dd", *ends, "bs=16M", count], check=True, capture_output=True)
        speeds[name] = 16e6 * 1.048576 * (megabytes // 16) / (time.perf_counter() - start)
    path.unlink()
    return [speeds["read"], speeds["write"]]


def fio(folder: str) -> list[float]:
    """By `fio`, four requests at a time."""
    path, speeds = Path(folder) / "disk_tier_fio", []
    options = "--direct=1 --bs=8m --size=1g --ioengine=libaio --iodepth=4 --output-format=json"
    for kind in ("write", "read", "rw"):
        command = ["fio", "--name=disk", f"--filename={path}", f"--rw={kind}", *options.split()]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (job,) = json.loads(printed)["jobs"]
        speeds.append(sum(job[way]["bw_bytes"] for way in ("read", "write")))
    path.unlink()
    write, read, both = speeds
    return [read, write, both]


def table(found: dict[str, Any], speeds: list[dict[str, list[float]]]) -> str:
    """What was measured, with each disk speed in GB/s before and after."""
    nbytes = found["file_bytes"]
    lines = [
        f"{found['parameters'] / 1e9:.2f} billion parameters, {nbytes / 1e9:.1f} GB on the disk",
        f"peak of RssAnon + RssShmem {found['initializing_bytes'] / 1e9:.2f} GB before the first "
        f"step, {found['training_bytes'] / 1e9:.2f} GB from then on, of which "
        f"{found['buffer_bytes'] / 1e9:.2f} GB of buffers",
        f"initialized in {found['initialized_seconds']:.1f} s",
        "step     loss  all s  update  reading  computing  writing    I/O  read GB/s  write GB/s",
    ]
    for number, step in enumerate(found["steps"]):
        kinds = ("", "read_", "compute_", "write_", "io_")
        times = [step[f"disk_{kind}seconds"] for kind in kinds]
        read, write = (nbytes / seconds / 1e9 for seconds in (times[1], times[3]))
        lines.append(
            f"{number:4d} {step['loss']:8.4f} {step['seconds']:6.1f} {times[0]:7.1f} "
            f"{times[1]:8.1f} {times[2]:10.1f} {times[3]:8.1f} {times[4]:6.1f} {read:10.2f} "
            f"{write:11.2f}"
        )
    for when, by_tool in zip(("before", "after"), speeds):
        for tool, rates in by_tool.items():
            texts = (f"{kind} {x / 1e9:.2f}" for kind, x in zip(("read", "write", "both"), rates))
            lines.append(f"{tool} {when}: {', '.join(texts)}")
        planned = 2 * nbytes / by_tool["measure_disk"][2]
        lines.append(f"an update by the plan with --disk: {planned:.1f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--bucket", type=int, default=1 << 22, help="sub_group_size")
    parser.add_argument("--buffers", type=int, default=4, help="buffer_count")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--compare", action="store_true", help="two layers, disk against memory")
    parser.add_argument("--in-memory", action="store_true", help="buckets in memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.compare:
        both = [in_child(args, layers=2, in_memory=x)["state_hash"] for x in (False, True)]
        print("bitwise equal" if both[0] == both[1] else f"unequal: {both}")
        raise SystemExit(both[0] != both[1])
    speeds = [disk_speeds(args.folder)]
    found = in_child(args)
    speeds.append(disk_speeds(args.folder))
    print(json.dumps({**found, "disk": speeds}) if args.json else table(found, speeds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(train(argparse.Namespace(**json.loads(sys.argv[2])))))
    else:
        main()
