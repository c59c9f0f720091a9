"""Saving while training goes on: what is written is the state of its step, and training is as without it."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import LATEST, MIXES, Net, loss_of, make
from optimizer_cases import assert_equal, snapshot

import hostward
from hostward.checkpoint import api, staging, writer
from hostward.checkpoint.collective import Stop
from hostward.checkpoint.save_plan import PiecePlanner
from hostward.checkpoint.writer import CheckedFile, DirectFile
from hostward.errors import CheckpointError, MemoryLimitError
from hostward.kernels import reference
from hostward.kernels.cpu.memory_copy import Copy, copy
from hostward.optim import state_reader
from hostward.optim.state_reader import Readers, Source, Stretch
from hostward.runtime import pinned_memory
from hostward.runtime.backend import Buffer, Tier
from hostward.runtime.cuda import memory as cuda_memory
from hostward.runtime.simulated.backend import Order, SimulatedBackend

MODES: tuple[api.Mode, ...] = ("snapshot", "stream")
ORDERS = {"eager": Order(eager=True), "late": LATEST, "random": Order(seed=5)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is read so slowly that training comes to its next change before all is read."""
    monkeypatch.setattr(PiecePlanner, "read", slow(PiecePlanner.read))
    monkeypatch.setattr(staging, "copy", slow(copy))
    monkeypatch.setattr(staging, "_TOGETHER_BYTES", 1)


def slow(call: Callable[..., Any]) -> Callable[..., Any]:
    def later(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.002)
        return call(*arguments, **named)

    return later


def step(model: Net, optimizer: hostward.AdamW, number: int) -> None:
    optimizer.zero_grad()
    with optimizer.accumulate(last=True):
        loss_of(model, number).backward()
    optimizer.step()


def begin(saver: api.Saver, model: Net, optimizer: hostward.AdamW) -> None:
    parts = api.parts_of(model, optimizer)
    assert saver.save(2, tensors=parts.tensors, plain={"optimizer": parts.optimizer}) is None


def saved_state(path: Path | None, dtype: torch.dtype, mix: str = "device") -> dict[str, torch.Tensor]:
    """What a checkpoint holds, loaded into a new model and optimizer."""
    assert path is not None
    model, optimizer = make(mix, dtype)
    api.restore(path, model, optimizer)
    return snapshot(model, optimizer)


@pytest.mark.usefixtures("slow_reads")
@pytest.mark.parametrize(
    ("mix", "dtype", "order"),
    [(mix, "bf16", "late") for mix in MIXES] + [("mixed", "fp16", "random"), ("host", "fp32", "eager")],
)
def test_nothing_is_torn(tmp_path: Path, mix: str, dtype: str, order: str) -> None:
    """In one of the modes, in turn, and where several placements meet in each."""
    modes = MODES if (mix, dtype) == ("mixed", "bf16") else [MODES[list(MIXES).index(mix) % len(MODES)]]
    for mode in modes:
        saved_beside_training(tmp_path / mode, mode, mix, dtype, order)


@pytest.mark.usefixtures("slow_reads")
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_torn_by_steps_that_are_guessed_in_backward(tmp_path: Path, mode: api.Mode) -> None:
    saved_beside_training(tmp_path, mode, "host", "bf16", "eager", step_early=True, max_grad_norm=None)


def saved_beside_training(tmp_path: Path, mode: api.Mode, mix: str, dtype: str, order: str, **options: object) -> None:
    ends = []
    expected: dict[str, torch.Tensor] = {}
    for saves in (False, True):
        model, optimizer = make(mix, DTYPES[dtype], ORDERS[order], **options)
        saver = api.Saver(tmp_path, mode=mode)
        for number in range(5):
            if number == 2 and saves:
                begin(saver, model, optimizer)
            elif number == 2:
                expected = snapshot(model, optimizer)
            step(model, optimizer, number)
        ends.append(snapshot(model, optimizer))
        if saves:
            assert_equal(saved_state(saver.finish(), DTYPES[dtype]), expected)
        saver.close()
    assert_equal(ends[1], ends[0])


@pytest.mark.usefixtures("slow_reads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", ["load_state_dict", "reseed", "add_param_group", "step", "sleep"])
def test_whatever_changes_the_state_waits_until_it_is_read(tmp_path: Path, mode: api.Mode, change: str) -> None:
    model, optimizer = make("mixed", torch.bfloat16)
    step(model, optimizer, 0)
    other, later = make("device", torch.bfloat16)
    step(other, later, 7)
    expected = snapshot(model, optimizer)
    saver = api.Saver(tmp_path, mode=mode)
    begin(saver, model, optimizer)
    if change == "load_state_dict":
        optimizer.load_state_dict(later.state_dict())
    elif change == "reseed":
        optimizer.reseed()
    elif change == "step":
        step(model, optimizer, 1)
    elif change == "sleep":
        optimizer.sleep()
        optimizer.wake()
    else:
        extra = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [("extra", extra)]})
    assert_equal(saved_state(saver.finish(), torch.bfloat16), expected)
    saver.close()


@pytest.mark.usefixtures("slow_reads")
@pytest.mark.parametrize("mode", MODES)
def test_buffers_and_weights_that_are_not_trained_are_those_of_the_step(tmp_path: Path, mode: api.Mode) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    optimizer = hostward.AdamW(model, offload_fraction=1.0)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    saver = api.Saver(tmp_path, mode=mode)
    begin(saver, model, optimizer)
    model(torch.randn(8, 4)).sum().backward()  # moves the running means
    optimizer.step()
    path = saver.finish()
    saver.close()
    assert path is not None
    found = {f"model/{name}": torch.zeros_like(t) for name, t in expected.items()}
    api.load(path, found, ignore=[n for n in api.tensor_index(path) if not n.startswith("model/")])
    assert_equal({name.removeprefix("model/"): t for name, t in found.items()}, expected)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_not_trained_are_saved_whatever_their_type(
    tmp_path: Path, mode: api.Mode | None, dtype: torch.dtype
) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    frozen = torch.arange(6).to(dtype)
    model.register_parameter("table", torch.nn.Parameter(frozen.clone(), requires_grad=False))
    optimizer = hostward.AdamW(model, offload_fraction=1.0)
    saver = api.Saver(tmp_path, mode=mode)
    parts = api.parts_of(model, optimizer)
    path = saver.save(2, tensors=parts.tensors, plain={"optimizer": parts.optimizer}) or saver.finish()
    saver.close()
    assert path is not None
    found = {"model/table": torch.zeros_like(frozen)}
    api.load(path, found, ignore=[n for n in api.tensor_index(path) if n not in found])
    assert torch.equal(found["model/table"].view(torch.uint8), frozen.view(torch.uint8))


def test_what_lies_on_the_device_comes_to_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stretches of fp32, of which two stand for device memory."""
    data = torch.arange(30, dtype=torch.float32)
    stretches = tuple(Stretch(10 * i, 10 * (i + 1), data[10 * i : 10 * (i + 1)].clone()) for i in range(3))
    there = {stretches[i].data.untyped_storage().data_ptr() for i in (0, 2)}
    monkeypatch.setattr(state_reader, "on_host", lambda t: t.untyped_storage().data_ptr() not in there)
    backend = SimulatedBackend()
    source = Source(torch.Size([30]), torch.float32, stretches, data, backend, Readers())
    fetched: list[list[int]] = []
    fetch = backend.fetch

    def noted(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        fetched.append([into.data_ptr() for into, _ in pairs])
        fetch(pairs)

    monkeypatch.setattr(backend, "fetch", noted)
    room = torch.zeros(80, dtype=torch.uint8)
    assert torch.equal(source.read([5], [20], room), data[5:25])
    assert fetched == [[room.data_ptr(), room.data_ptr() + 4 * 15]]
    with pytest.raises(ValueError, match="needs room"):
        source.read([5], [20], None)


def test_a_rank_without_an_element_of_a_tensor_reads_none_and_needs_no_room() -> None:
    source = Source(torch.Size([0, 8]), torch.float32, (), torch.empty(0), SimulatedBackend(), Readers())
    assert not source.needs_room()
    assert source.read([0, 0], [0, 8], None).shape == (0, 8)


def test_a_box_lies_in_parts_of_memory_and_is_read_from_where_they_are_copied_to() -> None:
    """Seen red: the parts of one half taken for those of the other; read from where it lies."""
    master = reference.canonical(np.random.default_rng(4).standard_normal(20).astype(np.float32))
    weight, remainder = reference.split_master(master)
    high, low = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16), torch.from_numpy(remainder)
    stretches = tuple(Stretch(i, i + 10, high[i : i + 10], low[i : i + 10]) for i in (0, 10))
    source = Source(torch.Size([20]), torch.float32, stretches, torch.empty(0), SimulatedBackend(), Readers())
    found = [(memory.data_ptr(), start, stop) for memory, start, stop in source.memory_of([4], [15])]
    begins = [half.data_ptr() for s in stretches for half in (s.data, s.low) if half is not None]
    assert found == [(begins[0], 8, 20), (begins[1], 8, 20), (begins[2], 0, 18), (begins[3], 0, 18)]
    copies = {memory.data_ptr(): memory.clone() for memory in source.memory}
    for half in (high, low):
        half.zero_()
    read = source.read([4], [15], torch.zeros(60, dtype=torch.uint8), lambda memory: copies[memory.data_ptr()])
    assert torch.equal(read, torch.from_numpy(master[4:19]))


def test_what_comes_through_rooms_has_the_bits_of_a_save_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stands for device memory, in more pieces than there are rooms, beside a frozen weight of odd size that is
    larger than all others. Seen red: one room for all of a group; no limit of rooms; nothing fetched; rooms that begin
    wherever the largest weight ends.
    """
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Module()
    for i in range(9):
        data = torch.randn(200 + i, generator=generator).bfloat16()
        model.register_parameter(f"w{i}", torch.nn.Parameter(data))
    frozen = torch.randn(1001, generator=generator).bfloat16()
    model.register_parameter("frozen", torch.nn.Parameter(frozen, requires_grad=False))
    optimizer = hostward.AdamW(model, lr=1e-3, offload_fraction=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.wait()
    parts = api.parts_of(model, optimizer)
    expected = loaded(api.save(tmp_path / "waited", 1, tensors=parts.tensors, plain={}))
    stretches = [s for value in parts.tensors.values() if isinstance(value, Source) for s in value.stretches]
    halves = [half for s in stretches for half in (s.data, s.low) if half is not None]
    there = {half.untyped_storage().data_ptr() for half in halves}
    for module in (state_reader, staging):
        monkeypatch.setattr(module, "on_host", lambda t: t.untyped_storage().data_ptr() not in there)
    monkeypatch.setattr("hostward.checkpoint.async_saver._threads", lambda _: 2)
    saver = api.Saver(tmp_path / "beside", mode="snapshot")
    saver.save(1, tensors=parts.tensors, plain={})
    path = saver.finish()
    saver.close()
    assert path is not None
    assert_equal(loaded(path), expected)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    found = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in api.tensor_index(path).items()}
    api.load(path, found)
    return found


def test_what_needs_no_device_does_not_wait_for_one() -> None:
    """Masters whose halves lie on the host are read without a look at the lane, which may be busy. Seen red."""
    stream: Any = None  # any use of it fails here
    cuda_memory.fetch(stream, [])


def test_halves_of_masters_on_the_device_come_to_different_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stretches, of which all stands for device memory. Seen red: the low halves read over the high ones."""
    master = reference.canonical(np.random.default_rng(4).standard_normal(20).astype(np.float32))
    weight, remainder = reference.split_master(master)
    high, low = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16), torch.from_numpy(remainder)
    stretches = tuple(Stretch(i, i + 10, high[i : i + 10], low[i : i + 10]) for i in (0, 10))
    room = torch.zeros(120, dtype=torch.uint8)
    here = room.untyped_storage().data_ptr()
    monkeypatch.setattr(state_reader, "on_host", lambda t: t.untyped_storage().data_ptr() == here)
    backend, expected = SimulatedBackend(), torch.from_numpy(master[4:19])
    source = Source(torch.Size([20]), torch.float32, stretches, expected, backend, Readers())
    assert torch.equal(source.read([4], [15], room), expected)


def test_a_folder_without_a_checkpoint_and_the_folder_of_a_run_are_told_apart(tmp_path: Path) -> None:
    model, optimizer = make("host")
    assert api.latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint to restore"):
        api.restore(api.latest(tmp_path), model, optimizer)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint") as caught:
        api.restore(tmp_path, model, optimizer)
    assert "latest" not in caught.value.fix
    parts = api.parts_of(model, optimizer)
    api.save(tmp_path, 1, tensors=parts.tensors, plain={"optimizer": parts.optimizer})
    with pytest.raises(CheckpointError, match="is not a complete checkpoint") as caught:
        api.restore(tmp_path, model, optimizer)
    assert caught.value.fix == f"checkpoint.latest({str(tmp_path)!r}) names the newest one in it"


def test_a_snapshot_that_does_not_fit_is_refused_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make("host")
    step(model, optimizer, 0)
    saver = api.Saver(tmp_path, mode="snapshot")
    small = replace(pinned_memory.host_memory(), available_bytes=600_000)
    with monkeypatch.context() as patched:
        patched.setattr(pinned_memory, "host_memory", lambda: small)
        with pytest.raises(MemoryLimitError, match="snapshot of a save"):
            begin(saver, model, optimizer)
    assert not saver.saving
    step(model, optimizer, 1)
    begin(saver, model, optimizer)
    assert saver.finish() == tmp_path / "iter_0000002"
    saver.close()
    assert "snapshot of a save" not in optimizer.backend.ledger.by_owner(Tier.HOST)


@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_fails_beside_training_is_told_and_nothing_is_left(tmp_path: Path, mode: api.Mode) -> None:
    model, optimizer = make("mixed")
    saver = api.Saver(tmp_path, mode=mode)
    begin(saver, model, optimizer)
    assert saver.finish() == tmp_path / "iter_0000002"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()  # what a pointer cannot replace
    step(model, optimizer, 0)
    begin(saver, model, optimizer)
    step(model, optimizer, 1)
    with pytest.raises(CheckpointError, match="cannot save checkpoint"):
        saver.finish()
    assert not saver.saving
    saver.close()


@pytest.mark.usefixtures("slow_reads")
def test_a_save_that_is_given_up_leaves_the_one_before(tmp_path: Path) -> None:
    model, optimizer = make("host")
    before = snapshot(model, optimizer)
    api.save(tmp_path, 1, tensors=(p := api.parts_of(model, optimizer)).tensors, plain={"optimizer": p.optimizer})
    saver = api.Saver(tmp_path, mode="stream")
    step(model, optimizer, 0)
    begin(saver, model, optimizer)
    saver.close()
    step(model, optimizer, 1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".iter")] == []
    assert_equal(saved_state(api.latest(tmp_path), torch.float32), before)


def test_a_snapshot_is_written_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that write would take cores and memory from those that copy, for which the step waits."""
    model, optimizer = make("mixed")
    step(model, optimizer, 0)
    saver = api.Saver(tmp_path, mode="snapshot")
    asked: list[Any] = []
    read = PiecePlanner.read

    def noted(planner: PiecePlanner, item: Any, *where: Any) -> torch.Tensor:
        if planner.source_of(item) is not None:
            asked.append(item)
        return read(planner, item, *where)

    def late(copies: Sequence[Copy], *, threads: int) -> None:
        time.sleep(0.02)
        assert asked == []
        copy(copies, threads=threads)

    monkeypatch.setattr(staging, "_TOGETHER_BYTES", 4096)
    monkeypatch.setattr(staging, "copy", late)
    monkeypatch.setattr(PiecePlanner, "read", noted)
    expected = snapshot(model, optimizer)
    begin(saver, model, optimizer)
    step(model, optimizer, 1)
    path = saver.finish()
    saver.close()
    assert asked
    assert_equal(saved_state(path, torch.float32), expected)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_snapshot_passes_the_page_cache_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: api.Mode | None
) -> None:
    """Each matrix from where it lies, or, a master of two halves, from where it was joined; headers and rests through a
    buffer. Whoever waits for the disk uses the cache.
    """
    for module in (writer, staging):
        monkeypatch.setattr(module, "STAGED_BYTES", 16384)
    monkeypatch.setattr("hostward.checkpoint.async_saver._threads", lambda _: 2)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 129, bias=i == 1, dtype=torch.bfloat16) for i in range(4)))
    optimizer = hostward.AdamW(model, lr=1e-3, offload_fraction=1.0)
    optimizer.step()
    written: list[tuple[int, int]] = []
    put, write = DirectFile._write_staged, writer.write_all

    def noted(descriptor: int, data: memoryview) -> None:
        written.append((writer.address_of(data) if data else 0, len(data)))
        write(descriptor, data)

    def buffered(file: DirectFile, size_bytes: int) -> None:
        put(file, size_bytes)
        written.pop()

    monkeypatch.setattr(writer, "write_all", noted)
    monkeypatch.setattr(DirectFile, "_write_staged", buffered)
    monkeypatch.setattr(
        writer, "new_file", lambda path, direct: plain(path, kind=DirectFile if direct else CheckedFile)
    )
    monkeypatch.setattr(writer, "in_threads", lambda bodies, stop: [body() for body in bodies])
    tensors = api.parts_of(model, optimizer).tensors
    saver = api.Saver(tmp_path, mode=mode)
    path = saver.save(1, tensors=tensors, plain={}) or saver.finish()
    kept = memory_of(saver._snapshot._buffer.data) if saver._snapshot is not None else range(0)
    rooms = [memory_of(room.data) for room in saver._rooms]
    saver.close()
    if mode == "snapshot":
        matrix = 128 * 129
        lies, joined = matrix * 4 // 4096 * 4096, matrix * 2 // 4096 * 4096
        assert sorted(size for address, size in written if address in kept) == [joined] * 4 + [lies] * 8
        assert sorted(size for address, size in written if any(address in room for room in rooms)) == [lies] * 4
        assert len(written) == 16
    else:
        assert len(written) > 200
    assert path is not None
    found = {n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in api.tensor_index(path).items()}
    api.load(path, found)
    assert_equal({n: found[f"model/{n}"] for n in model.state_dict()}, dict(model.state_dict()))


def plain(path: Path, *, kind: type[CheckedFile]) -> CheckedFile:
    """A file on any file system, one without O_DIRECT too."""
    return kind(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def test_a_group_is_copied_while_the_next_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all threads of the host's step, from memory that nothing is fetched into meanwhile."""
    model, optimizer = make("mixed", torch.bfloat16)
    step(model, optimizer, 0)
    expected = snapshot(model, optimizer)
    saver = api.Saver(tmp_path, mode="snapshot")
    groups: list[list[range]] = []
    at_once: list[tuple[list[range], list[range]]] = []
    ahead = threading.Semaphore(0)
    fetch: Callable[..., list[Copy]] = staging._to_host

    def noted(group: Sequence[Any]) -> list[Copy]:
        fetched = fetch(group)
        groups.append([memory_of(piece.room) for piece in group if piece.room is not None])
        ahead.release()
        return fetched

    def meets(made: list[Copy], *, threads: int) -> None:
        assert threads == 6
        ahead.acquire(timeout=20)  # of this group
        assert ahead.acquire(timeout=20)  # of the next
        at_once.append((groups[len(at_once)], groups[len(at_once) + 1]))
        ahead.release()
        copy(made, threads=threads)

    device = [s for s in api.parts_of(model, optimizer).tensors.values() if isinstance(s, Source)]
    there = {m.data_ptr() for s in device[::2] for m in s.memory}
    with monkeypatch.context() as patched:
        patched.setattr(optimizer.backend, "threads", 6)
        patched.setattr("hostward.checkpoint.async_saver._threads", lambda _: 2)
        patched.setattr(staging, "_TOGETHER_BYTES", 4096)
        patched.setattr(staging, "on_host", lambda t: t.data_ptr() not in there)
        patched.setattr(staging, "_to_host", noted)
        patched.setattr(staging, "copy", meets)
        begin(saver, model, optimizer)
        path = saver.finish()
    saver.close()
    assert len(at_once) > 3
    assert not any(overlap(a, b) for now, following in at_once for a in now for b in following)
    assert not any(overlap(a, b) for group in groups for a, b in itertools.combinations(group, 2))
    assert max(map(len, groups)) > 2  # small ones share a room
    assert_equal(saved_state(path, torch.bfloat16), expected)


def memory_of(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@pytest.mark.parametrize("every", [1, 3])
def test_items_have_the_bits_of_their_copies_wherever_they_begin(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of tensors end anywhere in the parts of memory that are copied; other ranks may write some of them."""
    model, optimizer = make("mixed", torch.bfloat16)
    step(model, optimizer, 0)
    planner = PiecePlanner(api.parts_of(model, optimizer).tensors, piece_bytes=264)
    planner.set_up_planner(planner.described, None, is_coordinator=True)
    items = [item for item in planner.create_local_plan().items if planner.source_of(item)][::every]
    expected = [planner.read(item, torch.zeros(2048, dtype=torch.uint8)).clone() for item in items]
    kept = staging.Snapshot(optimizer.backend, staging.snapshot_bytes(planner.sources))
    kept._buffer.data.fill_(0x5A)
    rooms = [torch.zeros(1280, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(staging, "_TOGETHER_BYTES", 4096)
    copies = kept.of(planner, items, rooms, Stop())
    assert len(copies._groups) > 3
    assert sum(len(piece.data) for group in copies._groups for piece in group) <= kept.size_bytes
    copies.make()
    for memory in (memory for source in planner.sources for memory in source.memory):
        memory.zero_()
    assert len(items) > 100
    for item, bits in zip(items, expected, strict=True):
        assert torch.equal(copies.read(item, rooms[0]).view(torch.uint8), bits.view(torch.uint8))


@pytest.mark.parametrize("shift", [0, 64, 4032])
def test_much_memory_has_a_place_that_the_disk_reads_directly(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a page, wherever the memory of the snapshot begins; and no two have one place."""
    monkeypatch.setattr(staging, "STAGED_BYTES", 1000)
    model, optimizer = make("mixed", torch.bfloat16)
    planner = PiecePlanner(api.parts_of(model, optimizer).tensors)
    planner.set_up_planner(planner.described, None, is_coordinator=True)
    items = planner.create_local_plan().items
    size_bytes = staging.snapshot_bytes(planner.sources)
    kept = staging.Snapshot(optimizer.backend, size_bytes)
    pages = torch.frombuffer(mmap.mmap(-1, size_bytes + 4096), dtype=torch.uint8)
    kept._buffer = Buffer(Tier.HOST, pages[shift : shift + size_bytes], "shifted")
    places = kept.of(planner, items, [torch.zeros(1 << 20, dtype=torch.uint8)], Stop())._places
    much = [place for place in places.values() if len(place) >= 1000]
    assert 10 < len(much) < len(places)
    assert all(place.data_ptr() % 4096 == 0 for place in much)
    assert all(len(place) == memory[1] for memory, place in places.items())
    found = sorted((memory_of(place) for place in places.values()), key=lambda place: place.start)
    assert not any(overlap(a, b) for a, b in itertools.pairwise(found))


def test_a_snapshot_holds_no_byte_twice() -> None:
    """Weights are the upper halves of their masters: 12 bytes per parameter for bfloat16 and float32, 14 for fp16."""
    for name, each in (("bf16", 12), ("fp32", 12), ("fp16", 14)):
        model, optimizer = make("mixed", DTYPES[name])
        tensors = api.parts_of(model, optimizer).tensors
        ranges = sum(len(s.stretches) for s in tensors.values() if isinstance(s, Source))
        wanted = each * sum(p.numel() for p in model.parameters())
        taken = staging.snapshot_bytes([s for s in tensors.values() if isinstance(s, Source)])
        assert wanted <= taken < wanted + 2 * 64 * ranges + 4096


@pytest.mark.parametrize("mode", MODES)
def test_state_that_cannot_be_read_is_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: api.Mode
) -> None:
    """Threads that write, and wait for what is not copied any more, end as well. Seen red: no end of it."""
    model, optimizer = make("host")
    saver = api.Saver(tmp_path, mode=mode)
    where, name = (staging, "_to_host") if mode == "snapshot" else (PiecePlanner, "read")
    read: Callable[..., Any] = getattr(where, name)
    calls = itertools.count(1)

    def fails(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("the device is lost")
        return read(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(staging, "_TOGETHER_BYTES", 1)
        patched.setattr(where, name, fails)
        begin(saver, model, optimizer)
        step(model, optimizer, 0)
        with pytest.raises(CheckpointError, match="the device is lost"):
            saver.finish()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".iter")] == []
    step(model, optimizer, 1)
    expected = snapshot(model, optimizer)
    begin(saver, model, optimizer)
    assert_equal(saved_state(saver.finish(), torch.float32), expected)
    saver.close()
