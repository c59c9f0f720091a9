"""Saving beside training: what it costs the steps, and its share of the disk's own write rate.

    python benchmarks/saving.py --folder /mnt/disk --layers 16 --width 4096 --json benchmarks/results/DATE-saving.json
    torchrun --nproc-per-node 2 benchmarks/saving.py ...         # the same, divided over the GPUs of a machine by FSDP2

A stack of linear layers is trained with random input. For each way of saving: --steps steps without a save, then the
steps that run while one checkpoint is saved, and as many without a save again, for machines change their pace. A disk
that others use too changes from minute to minute, so it is measured before the first row and after each: as many bytes
as a checkpoint has (--probe: a share of them), by as many threads as a save has, written plainly into files of their
own and made durable. A row is compared with the faster of the two beside it. Columns:

    step        median seconds of a step beside a save, over the median without one
    stall       seconds by which the steps until the save ended took longer than as many without a save
    allowed     seconds in which the disk takes as many bytes
    of 50       the stall over 50 steps without a save: what saving costs that is done every 50 steps
    save        seconds from the call to the published checkpoint
    rate        bytes of the checkpoint over those seconds, and over the disk's rate
    held        host bytes besides the state while it is saved, by owner, of all ranks (in the file)
    cores       seconds of cores that all ranks took meanwhile, training included (in the file)

`wait` is a save that is waited for: no step runs beside it. `snapshot` is saved twice, and its second save counts: the
first takes the memory. `disk` is no save: as many threads write as many bytes past the page cache and do nothing else.
What steps lose to that, no way of saving beside them gets back. Several ranks ask each other behind every step whether
the save is over on all of them; seconds are those of the slowest.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hostward
from hostward.checkpoint import api
from hostward.checkpoint.writer import WRITE_BACK_BYTES
from hostward.plan import memory_model
from hostward.plan.memory_model import PIECE_BYTES, writer_count
from hostward.runtime.backend import Tier
from hostward.trainer.process_group import Ranks

from machine import describe

WAYS: dict[str, api.Mode | None] = {"wait": None, "snapshot": "snapshot", "stream": "stream", "disk": None}
OWNERS = ("buffers of a save", "snapshot of a save")


class Stack(torch.nn.Module):
    """Linear layers, one after the other."""

    def __init__(self, layers: int, width: int, **where: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False, **where) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def disk_bytes_per_s(folder: Path, size_bytes: int, ranks: Ranks) -> float:
    """Plain writes of all threads that save into files of their own, made durable; the disk is asked to begin with
    every piece at once, and memory to let go of those before, as a save asks it.
    """
    count = writer_count(ranks.local_size)
    data = os.urandom(1 << 20) * (PIECE_BYTES >> 20)

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            total = left = size_bytes // ranks.size // count
            while left > 0:
                written = file.write(data[: min(left, len(data))])
                behind = max(0, total - left - WRITE_BACK_BYTES)
                os.posix_fadvise(file.fileno(), behind, total - left + written - behind, os.POSIX_FADV_DONTNEED)
                left -= written
            os.fsync(file.fileno())

    paths = [folder / f"plain{ranks.rank}.{i}" for i in range(count)]
    ranks.gather(None)  # all begin together
    start_s = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(write, paths))
    seconds = max(ranks.gather(time.perf_counter() - start_s))
    for path in paths:
        path.unlink()
    ranks.gather(None)
    return size_bytes / seconds


class PlainWriting:
    """In place of a Saver: threads that write so many bytes of all ranks, past the page cache."""

    def __init__(self, folder: Path, size_bytes: int, ranks: Ranks) -> None:
        self._count = writer_count(ranks.local_size)
        self._each_bytes = size_bytes // ranks.size // self._count // PIECE_BYTES * PIECE_BYTES
        self._folder, self._rank = folder, ranks.rank
        self._data = mmap.mmap(-1, PIECE_BYTES)
        self._data[:] = os.urandom(1 << 20) * (PIECE_BYTES >> 20)
        self._pool = ThreadPoolExecutor(self._count)
        self._written: list[Future[None]] = []

    def save(self, iteration: int, **_: object) -> Path | None:
        self._folder.mkdir(exist_ok=True)
        paths = [self._folder / f"plain{self._rank}.{i}" for i in range(self._count)]
        self._written = [self._pool.submit(self._write, path) for path in paths]
        return None

    def _write(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for _ in range(0, self._each_bytes, PIECE_BYTES):
            os.write(descriptor, self._data)
        os.fsync(descriptor)
        os.close(descriptor)

    def poll(self) -> Path | None:
        return self.finish() if all(each.done() for each in self._written) else None

    def finish(self) -> Path:
        for each in self._written:
            each.result()
        return self._folder

    def close(self) -> None:
        self._pool.shutdown()
        self._data.close()


class Training:
    """A model in training, step by step."""

    def __init__(self, args: argparse.Namespace, device: torch.device, ranks: Ranks) -> None:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
        torch.manual_seed(0)
        self.model = Stack(args.layers, args.width, device=device, dtype=dtype)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if ranks.size > 1:
            for module in (*self.model.layers, self.model):
                fully_shard(module)
        self.optimizer = hostward.AdamW(self.model, lr=1e-4, max_grad_norm=1.0, offload_fraction=args.fraction)
        self._input = torch.randn(args.tokens, args.width, device=device, dtype=dtype)
        self._device = device

    def step_s(self) -> float:
        """Seconds of one step; the device is waited for, so that they are its own."""
        start_s = time.perf_counter()
        with self.optimizer.accumulate(last=True):
            self.model(self._input).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start_s


def one(training: Training, way: str, folder: Path, steps: int, plain_bytes: int, ranks: Ranks) -> dict[str, Any]:
    """One save, and the steps beside it."""
    without_s = [training.step_s() for _ in range(steps)]
    mode, group = WAYS[way], None if ranks.size == 1 else dist.group.WORLD
    plain = way == "disk"
    saver = PlainWriting(folder, plain_bytes, ranks) if plain else api.Saver(folder, mode=mode, group=group)
    if mode == "snapshot":  # the first one takes its memory
        saver.save(0, tensors=api.parts_of(training.model, training.optimizer).tensors, plain={})
        discard(saver.finish(), ranks)
        progress(ranks, "saved for the first time")
    training.optimizer.wait()
    used = os.times()
    start_s = time.perf_counter()
    path = saver.save(1, tensors=api.parts_of(training.model, training.optimizer).tensors, plain={})
    called_s = time.perf_counter() - start_s
    beside_s = []
    while not all(ranks.gather(path is not None)):
        beside_s.append(training.step_s())
        path = path or saver.poll()
    saved_s = max(ranks.gather(time.perf_counter() - start_s))
    done = os.times()
    held = training.optimizer.backend.ledger.by_owner(Tier.HOST)
    without_s += [training.step_s() for _ in range(steps)]
    saver.close()
    assert path is not None
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    discard(path, ranks)
    of_ranks = ranks.gather(
        {
            "without_s": without_s,
            "beside_s": beside_s,
            "call_s": called_s,
            "cores_user_s": done.user - used.user,
            "cores_system_s": done.system - used.system,
            "held_bytes": {owner: held[owner] for owner in OWNERS if owner in held},
        }
    )
    without_s = slowest(of_ranks, "without_s")
    usual_s = statistics.median(without_s)
    beside_s = slowest(of_ranks, "beside_s")
    called_s = max(r["call_s"] for r in of_ranks)
    stall_s = called_s + sum(beside_s) - usual_s * len(beside_s)
    return {
        "step_s": usual_s,
        "without_steps_s": without_s,
        "beside_step_s": statistics.median(beside_s) if beside_s else None,
        "beside_steps_s": beside_s,
        "call_s": called_s,
        "stall_s": stall_s,
        "stall_of_50_steps": stall_s / (50 * usual_s),
        "save_s": saved_s,
        "cores_user_s": sum(r["cores_user_s"] for r in of_ranks),
        "cores_system_s": sum(r["cores_system_s"] for r in of_ranks),
        "bytes": size_bytes,
        "bytes_per_s": size_bytes / saved_s,
        "held_bytes": {
            owner: sum(r["held_bytes"].get(owner, 0) for r in of_ranks) for owner in of_ranks[0]["held_bytes"]
        },
    }


def slowest(of_ranks: list[dict[str, Any]], what: str) -> list[float]:
    """Of each step the seconds of the rank that took longest."""
    return [max(each) for each in zip(*(r[what] for r in of_ranks), strict=True)]


def discard(path: Path | None, ranks: Ranks) -> None:
    """A checkpoint that all ranks have looked at."""
    assert path is not None
    ranks.gather(None)
    if ranks.first:
        shutil.rmtree(path)


def beside_disk(row: dict[str, Any], before: float, after: float) -> dict[str, Any]:
    """A row beside the disk's rates, bytes/s, before and after it."""
    disk = max(before, after)
    return row | {
        "disk_bytes_per_s": [before, after],
        "longest_stall_allowed_s": row["bytes"] / disk,
        "share_of_disk": row["bytes_per_s"] / disk,
    }


def progress(ranks: Ranks, said: str) -> None:
    if ranks.first:
        print(f"{time.perf_counter():.0f} s: {said}", file=sys.stderr, flush=True)


def show(row: dict[str, Any]) -> None:
    slower = "" if row["beside_step_s"] is None else f"{row['beside_step_s'] / row['step_s']:.3f}"
    before, after = (rate / 1e9 for rate in row["disk_bytes_per_s"])
    print(
        f"{row['way']:10}{slower:>8}{row['stall_s']:>10.2f}{row['longest_stall_allowed_s']:>9.2f}"
        f"{row['stall_of_50_steps']:>8.3f}{row['save_s']:>9.2f}{row['bytes_per_s'] / 1e9:>8.2f}"
        f"{row['share_of_disk']:>9.2f}   disk {before:.2f}, {after:.2f} GB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="in this order")
    parser.add_argument("--writers", type=int, default=memory_model.MOST_WRITERS, help="threads that write, at most")
    parser.add_argument("--probe", type=float, default=1.0, help="share of a checkpoint's bytes that probes write")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}: of {', '.join(WAYS)}")
    memory_model.MOST_WRITERS = args.writers
    ranks = Ranks.of(os.environ)
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks.join(device, timedelta(minutes=10))
    try:
        measure(args, device, ranks)
    finally:
        ranks.leave()


def measure(args: argparse.Namespace, device: torch.device, ranks: Ranks) -> None:
    training = Training(args, device, ranks)
    for _ in range(3):
        training.step_s()
    rows: list[dict[str, Any]] = []
    writers = ranks.size * writer_count(ranks.local_size)
    if ranks.first:
        print(f"{training.parameters:,} parameters, {ranks.size} ranks, {writers} threads write")
        print(
            f"{'way':10}{'step':>8}{'stall s':>10}{'allowed':>9}{'of 50':>8}{'save s':>9}{'GB/s':>8}{'of disk':>9}",
            flush=True,
        )
    with ExitStack() as kept:
        made = kept.enter_context(tempfile.TemporaryDirectory(dir=args.folder)) if ranks.first else None
        folder = Path(ranks.gather(made)[0])
        size_bytes = training.parameters * (14 if args.dtype == "bf16" else 12)
        probe_bytes = int(args.probe * size_bytes)
        progress(ranks, "trained")
        before = disk_bytes_per_s(folder, probe_bytes, ranks)
        for way in args.ways:
            progress(ranks, f"{way}: the disk writes {before / 1e9:.2f} GB/s")
            row = one(training, way, folder / way, args.steps, size_bytes, ranks)
            progress(ranks, f"saved in {row['save_s']:.1f} s")
            after = disk_bytes_per_s(folder, probe_bytes, ranks)
            rows.append({"way": way} | beside_disk(row, before, after))
            before = after
            if ranks.first:
                show(rows[-1])
                if args.json is not None:
                    head = {"machine": describe(), "parameters": training.parameters, "ranks": ranks.size}
                    args.json.write_text(json.dumps(head | {"writers": writers, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
