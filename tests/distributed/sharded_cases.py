"""What each rank does: a sharded network trained in whatever way a test asks for. Results are digests of bits."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hostward
from hostward.distributed import fsdp2
from hostward.errors import HostwardError
from hostward.runtime.backend import Event
from hostward.runtime.global_norm import NOT_FINITE
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

MIXES: Mapping[str, Mapping[str, float]] = {
    "device": {"offload_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.5, "streamed_fraction": 0.5},
    "halves": {"offload_fraction": 1.0, "streamed_fraction": 0.5},
}
ORDERS = {
    "eager": Order(eager=True),
    "late": Order(late=frozenset(lane for lane in Lane if lane is not Lane.COMPUTE)),
    "random": Order(seed=3),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Formats = Mapping[str, Mapping[str, torch.dtype]]
EVERYTHING = hostward.Activations(min_bytes=1)
WIDTH = 33
"""Odd, so that borders between ranks lie within chunks of the norm."""
SEVERAL_BUCKETS = 257
"""So wide that each rank has several buckets of a block."""


@functools.cache
def mesh_of(name: str) -> DeviceMesh:
    """A mesh over all ranks, or the rank's own row of one. "pairs" and "hybrid" are of four ranks."""
    if name == "all":
        return init_device_mesh("cpu", (dist.get_world_size(),))
    rows = (dist.get_world_size(), 1) if name == "alone" else (2, 2)
    grid = init_device_mesh("cpu", rows, mesh_dim_names=("copy", "shard"))
    return grid if name == "hybrid" else grid["shard"]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 5 * width)
        self.down = torch.nn.Linear(5 * width, width)
        self.three = torch.nn.Parameter(torch.randn(3, width))  # a fourth rank has none of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.three.sum(0).tanh()
        return out


class Net(torch.nn.Module):
    """Tokens to logits. The root owns the embedding, a scale of one element, and what follows the blocks.

    `heads`: blocks have a vector of 128 elements as well, which forward does not use.
    """

    def __init__(self, width: int = WIDTH, *, heads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.full((1,), 0.7))
        self.embed = torch.nn.Embedding(2000, width)  # in one process above one bucket
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 10)
        for block in self.blocks if heads else ():
            block.q_norm = torch.nn.Parameter(torch.ones(128))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x).clone()  # FSDP2 warns of an output that is a view
        return out


def sharded(
    mesh: str = "all",
    dtype: str = "fp32",
    *,
    width: int = WIDTH,
    heads: bool = False,
    policy: bool = False,
    fp32: str | None = None,
    frozen: bool = False,
    prefetch: bool = False,
    alone: Sequence[str] = (),
    **options: Any,
) -> Net:
    """The network after fully_shard, block by block. `policy`: compute and reduce in bf16; `alone`: other modules."""
    model = Net(width, heads=heads).to(DTYPES[dtype])
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if fp32:  # in which gradients are reduced, or everything is computed
        options["mp_policy"] = MixedPrecisionPolicy(**{fp32: torch.float32})
    if frozen:
        for block in model.blocks:
            block.norm.requires_grad_(False)  # type: ignore[union-attr, operator]
    for block in [*map(model.get_submodule, alone), *model.blocks]:
        fully_shard(block, mesh=mesh_of(mesh), **options)
    fully_shard(model, mesh=mesh_of(mesh), **options)
    if prefetch:
        blocks: list[Any] = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks[:2])  # type: ignore[operator]
        for block, later in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([later])
    return model


def adamw(model: torch.nn.Module, mix: str = "device", order: str = "eager", **options: Any) -> hostward.AdamW:
    backend = SimulatedBackend(threads=1, order=ORDERS[order])
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "max_grad_norm": 0.05, **MIXES[mix], **options}
    return hostward.AdamW(model, weight_decay=0.1, backend=backend, **settings)


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Other tokens on every rank."""
    generator = torch.Generator().manual_seed(10 * seed + torch.distributed.get_rank())
    logits = model(torch.randint(0, 2000, (4, 3), generator=generator)).float()
    loss: torch.Tensor = (logits - 1.0).square().mean()
    return loss


def backward(
    model: Net, optimizer: hostward.AdamW, step: int, microbatches: int, sync: bool, context: bool, always_last: bool
) -> None:
    for i in range(microbatches):
        last = always_last or i == microbatches - 1
        model.set_requires_gradient_sync(sync or last)  # type: ignore[operator]
        model.set_is_last_backward(last)  # type: ignore[operator]
        with optimizer.accumulate(last=last) if context else nullcontext():
            (loss_of(model, 100 * step + i) / microbatches).backward()


def add_by_hand(model: Net, step: int, microbatches: int) -> None:
    """float32 sums of the reduced bf16 gradients, in order."""
    sums: dict[str, torch.Tensor] = {}
    for i in range(microbatches):
        (loss_of(model, 100 * step + i) / microbatches).backward()
        for name, p in model.named_parameters():
            found = fsdp2.part_of(p.grad)  # type: ignore[arg-type]
            part = found.to(torch.bfloat16).float()
            assert torch.equal(part, found)  # reduced in bf16
            sums[name] = sums[name] + part if name in sums else part
            p.grad = None
    for name, p in model.named_parameters():
        p.grad = fsdp2.like(sums[name], p)


def digest(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    raw = local.detach().clone().view(-1).view(torch.uint8).numpy().tobytes()  # numpy locks the storage
    return f"{tuple(local.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


def snapshot(model: torch.nn.Module, optimizer: hostward.AdamW) -> dict[str, str]:
    """Digests of this rank's weights and state, by "role name"."""
    optimizer.wait()
    found = {f"weight {name}": digest(p) for name, p in model.named_parameters()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {
            f"{role} {name}": digest(value.view(-1) if role == "step" else value) for role, value in entry.items()
        }
    return found


def take_nap(model: torch.nn.Module, optimizer: hostward.AdamW) -> None:
    """All of it sleeps, without exception, and nobody gathers it meanwhile."""
    report = optimizer.sleep()
    assert not report.stays, report.explain()
    assert report.freed_bytes["weights"] > 0
    try:
        loss_of(model, 3)
    except hostward.errors.AsleepError:
        optimizer.wake()
    else:
        raise AssertionError("a forward while weights are asleep")


def train(
    mix: str = "device",
    order: str = "eager",
    *,
    steps: int = 2,
    microbatches: int = 1,
    sync: bool = True,
    context: bool = True,
    always_last: bool = False,
    clear: bool = True,
    evaluate: bool = False,
    write: bool = False,
    network: Mapping[str, Any] | None = None,
    activations: bool = False,
    weights: int | None = None,
    sums_in_fp32: bool = False,
    by_hand: bool = False,
    nap: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Weights, state, norms and losses after some steps, and where buckets were.

    Args:
        sync: FSDP2 reduces gradients in every microbatch, not in the last alone.
        context: gradients are taken in backward.
        always_last: every microbatch says that it is the last one.
        clear: gradients are cleared before each step.
        evaluate: the model is evaluated between backward and step.
        write: somebody else writes into a part before each step.
        by_hand: gradients are taken out of `.grad` after each microbatch, and added up here.
        nap: everything sleeps before the first forward, before each step and after it.
    """
    model = sharded(**(network or {}))
    if sums_in_fp32:
        options["grad_dtype"] = torch.float32
    optimizer = adamw(model, mix, order, **options)
    run = None
    if activations or weights:
        run = hostward.attach(model, optimizer, activations=EVERYTHING if activations else None, weights=weights)
    told: list[Any] = []
    rest = functools.partial(take_nap, model, optimizer) if nap else int
    for step in range(steps):
        rest()
        if clear:
            optimizer.zero_grad()
        if by_hand:
            add_by_hand(model, step, microbatches)
        else:
            backward(model, optimizer, step, microbatches, sync, context, always_last)
        if evaluate:
            with torch.no_grad():  # FSDP2 leaves the root's parameters whole after it
                told.append(loss_of(model, 8).item().hex())
        if write:
            optimizer.wait_for_weights()
            with torch.no_grad():
                model.blocks[0].up.weight.to_local().mul_(1.5)  # type: ignore[union-attr, operator]
        rest()
        optimizer.step()
        told.append((optimizer.grad_norm.hex(), optimizer.last_step_skipped))
    with torch.no_grad():
        told.append(loss_of(model, 7).item().hex())
    model.reshard()  # type: ignore[operator]
    away = None if run is None else run.report().weights
    if run is not None:
        run.detach()
    placements = sorted({bucket.placement.value for bucket in optimizer.plan.buckets})
    moved = 0 if run is None else run.report().offloaded_bytes
    to_host = optimizer.backend.ledger.copied_bytes[Lane.D2H]
    found = {"bits": snapshot(model, optimizer), "told": told, "placements": placements}
    found |= {"moved_bytes": moved, "to_host_bytes": to_host, "numel": optimizer.inventory.numel}
    found |= {"exchanged": [state.turn for state in optimizer._states if state.twin is not None]}
    return found | {"away": None if away is None else asdict(away)}


def gradients_that_wait(mix: str, microbatches: int = 1) -> dict[str, list[tuple[str, list[bool]]]]:
    """By layer, of each bucket: where it is placed, and of its gradients that are on the device after backward whether
    their memory is their own.
    """
    model = sharded(dtype="bf16", width=SEVERAL_BUCKETS)
    optimizer = adamw(model, mix)
    backward(model, optimizer, 0, microbatches, sync=True, context=True, always_last=False)
    found: dict[str, list[tuple[str, list[bool]]]] = {}
    buckets, placed = optimizer.inventory.buckets, optimizer.plan.buckets
    for bucket, where, gradients in zip(buckets, placed, optimizer._executor._gradients, strict=True):
        there = [held.data for held in gradients if held.data.numel()]
        own = [data.nbytes == data.untyped_storage().nbytes() for data in there]
        found.setdefault(bucket.layer, []).append((where.placement.value, own))
    return found


def moved_without_sharding() -> int:
    """Bytes of activations that leave in the same training of a network that is not sharded."""
    model = Net()
    with hostward.attach(model, activations=EVERYTHING, backend=SimulatedBackend(threads=1)) as run:
        for step in range(2):
            loss_of(model, 100 * step).backward()
        with torch.no_grad():
            loss_of(model, 7)
        return run.report().offloaded_bytes


def gradient_of(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """The whole gradient of a parameter; of the embedding most rows are zero."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 100 + step)
    made = torch.randn(shape, generator=generator)
    made *= torch.exp2(torch.randint(-12, 3, shape, generator=generator).float())
    return made


def given(
    mix: str = "device",
    *,
    steps: Sequence[int] = (0, 1, 2),
    network: Mapping[str, Any] | None = None,
    bad: int | None = None,
    load: str = "",
    save: str = "",
    dtype: torch.dtype = torch.float32,
    blocks: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Norms, whole weights and whole state after steps with given gradients.

    Args:
        network: None: it is not sharded.
        bad: the step in which the last rank has a gradient that is not finite.
        load, save: folders of distributed checkpoints, before and after.
        blocks: each rank's part of a matrix is whole blocks of 128 elements, and those of some vectors are not.
    """
    kind: dict[str, Any] = {"width": 512, "heads": True} if blocks else {}
    model: Any = Net(**kind) if network is None else sharded(**kind, **network)
    model.to(dtype)
    optimizer = adamw(model, mix, **options)
    if load:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    told = []
    for step in steps:
        for name, p in ((name, p) for name, p in model.named_parameters() if p.requires_grad):
            whole = gradient_of(name, p.shape, step).to(dtype)
            if step == bad and name == "embed.weight":
                whole[-1, -1] = float("inf")
            p.grad = whole if network is None else fsdp2.like(fsdp2.part_of_saved(name, whole, p).clone(), p)
        optimizer.step()
        told.append((optimizer.grad_norm.hex(), optimizer.last_step_skipped, total_of(optimizer)))
    optimizer.wait()
    if save:
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=save)
    found = {f"weight {name}": digest(whole_of(p)) for name, p in model.named_parameters()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": digest(whole_of(value).view(-1)) for role, value in entry.items()}
    return {
        "told": told,
        "bits": found,
        "counts": {n: int(e["step"]) for n, e in optimizer.state_dict()["state"].items()},
    }


def total_of(optimizer: hostward.AdamW) -> tuple[int, int]:
    """Sum of squares of the last step and its exponent, before rounding hides a difference."""
    optimizer.wait()
    partials, across = optimizer._memory.partials, optimizer._memory.across
    if across is not None:
        (high, low), top, _ = across.totals(partials, None)
        return (int(high) * 2**31 + int(low), int(top)) if top != NOT_FINITE else (0, int(top))
    sums, exponents = partials.sums.data, partials.exponents.data
    highest = exponents.max()
    if highest == NOT_FINITE:
        return 0, int(highest)
    return int((sums >> (2 * (highest - exponents)).clamp(0, 63)).sum()), int(highest)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def resumed(mix: str, other: str, **network: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Bits after three steps: in one go, and in a new process's objects from the second on, at another placement."""
    model = sharded(**network)
    optimizer = adamw(model, mix, "late")
    saved: tuple[Any, Any] = {}, {}
    for step in range(3):
        if step == 2:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            saved = weights, optimizer.state_dict()
        backward(model, optimizer, step, 1, True, True, False)
        optimizer.step()
    expected = snapshot(model, optimizer)
    again = sharded(**network)
    later = adamw(again, other, "late")
    later.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    backward(again, later, 2, 1, True, True, False)
    later.step()
    return expected, snapshot(again, later)


def scaled(mix: str = "device", *, context: bool = True, network: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Training with a gradient scaler; in the second step a loss of the last rank alone overflows."""
    model = sharded(**(network or {}))
    optimizer = adamw(model, mix)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    told = []
    for step in range(4):
        optimizer.zero_grad()
        with optimizer.accumulate(last=True) if context else nullcontext():
            loss = scaler.scale(loss_of(model, step))
            (loss * float("inf") if step == 1 and dist.get_rank() == dist.get_world_size() - 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        told.append((optimizer.grad_norm.hex(), optimizer.last_step_skipped, scaler.get_scale()))
    return {"bits": snapshot(model, optimizer), "told": told}


def loaded_whole(mesh: str) -> dict[str, str]:
    """Weights and state, whole, after a load of what one process has saved."""
    model, alone = sharded(mesh=mesh), Net()
    optimizer, before = adamw(model, "mixed"), adamw(alone, "host")
    loss = alone(torch.arange(12).view(4, 3)).square().mean()
    loss.backward()
    before.step()
    optimizer.load_state_dict(before.state_dict())
    found = {}
    for name, entry in before.state_dict()["state"].items():
        loaded = optimizer.state_dict()["state"][name]
        found |= {
            f"{role} {name}": "" if torch.equal(whole_of(loaded[role]), entry[role]) else "differs" for role in entry
        }
    return found


def loaded_in_formats(saved: Formats, wanted: Formats, *, broadcast: bool) -> dict[str, str]:
    """What says no to a whole state in one format, given to the ranks in another one by torch; "" if nothing does.

    By the names of both: torch puts what it is given into tensors of the dtypes that there are. `broadcast`: only the
    first rank has the whole state.
    """
    asked = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    given = StateDictOptions(full_state_dict=True, cpu_offload=broadcast, broadcast_from_rank0=broadcast)

    def made(dtypes: Mapping[str, torch.dtype]) -> tuple[Net, hostward.AdamW]:
        model = sharded(dtype="bf16")
        optimizer = adamw(model, "mixed", state_dtypes=dict(dtypes))
        backward(model, optimizer, 0, 1, True, True, True)
        optimizer.step()
        return model, optimizer

    found = {}
    for (name, dtypes), (other, others) in itertools.product(saved.items(), wanted.items()):
        state = get_optimizer_state_dict(*made(dtypes), options=asked)
        try:
            model, optimizer = made(others)
            set_optimizer_state_dict(model, optimizer, state, options=given)
            weights = dict(model.named_parameters())
            found[f"{name} into {other}"] = "".join(
                f"{of} is not the weight"
                for of, entry in optimizer.state_dict()["state"].items()
                if name == "main" and "master" in entry and not torch.equal(entry["master"], weights[of].float())
            )
        except HostwardError as error:
            found[f"{name} into {other}"] = error.what
    return found


class Tiny(torch.nn.Module):
    """Of these parameters the last of four ranks has no element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.three = torch.nn.Parameter(torch.randn(3, WIDTH))
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (x @ self.three.t()) * self.scale
        return out


def tiny(mix: str = "device", order: str = "late") -> dict[str, Any]:
    """Training of a model of which one rank has nothing; a parameter is added, also of three rows, after two steps."""
    model: Any = Tiny()
    model.later = torch.nn.Linear(WIDTH, 3, bias=False)
    fully_shard(model.later, mesh=mesh_of("all"))
    fully_shard(model, mesh=mesh_of("all"))
    first = [(name, p) for name, p in model.named_parameters() if not name.startswith("later")]
    optimizer = adamw(first, mix, order, module=model)  # type: ignore[arg-type]
    told = []
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [("later.weight", model.later.weight)]})
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, WIDTH, generator=generator) + torch.distributed.get_rank()
        with optimizer.accumulate(last=True):
            out = model(x) if step < 2 else model(x) + model.later(x)
            out.square().mean().backward()
        optimizer.step()
        told.append(optimizer.grad_norm.hex())
    counts = {name: int(entry["step"]) for name, entry in optimizer.state_dict()["state"].items()}
    return {"bits": snapshot(model, optimizer), "told": told, "counts": counts}


def order_of_use(alone: Sequence[str] = ()) -> tuple[list[str], bool]:
    """Layers of the buckets, in order; and whether state is staged when backward is over. `alone`: are gathered by
    themselves, as the blocks are, and then the scale is frozen.
    """
    model = sharded(alone=alone)
    model.scale.requires_grad_(not alone)
    optimizer = adamw(model, "streamed")
    with optimizer.accumulate(last=True):
        loss_of(model, 1).backward()
    staged = optimizer._executor._staged
    optimizer.step()
    return list(dict.fromkeys(optimizer._executor._layer_of_bucket)), staged


class Remembering(SimulatedBackend):
    """Keeps which streams of somebody else were made to wait, and for how many events."""

    def __init__(self) -> None:
        super().__init__(threads=1, order=ORDERS["eager"])
        self.held: list[tuple[object, int]] = []

    def wait_on_stream(self, stream: object, waits: Sequence[Event]) -> None:
        self.held.append((stream, len(waits)))
        super().wait_on_stream(stream, waits)


def held_gathers() -> tuple[list[int], list[int], list[int]]:
    """By group, in order of use: for how many events the stream that gathers waited in the first forward after a step,
    and in the second; and how many there are to wait for.
    """
    model, backend = sharded(alone=["embed", "head"]), Remembering()
    optimizer = hostward.AdamW(
        model, lr=1e-2, offload_fraction=1.0, streamed_fraction=0.5, max_grad_norm=0.05, backend=backend
    )
    loss_of(model, 0).backward()
    optimizer.step()
    backend.held.clear()
    found = []
    for seed in (1, 2):
        loss_of(model, seed)
        # Those that made gradients wait as well, before their memory is theirs again.
        found.append([count for stream, count in backend.held if stream not in optimizer._executor._sync.makers])
        backend.held.clear()
    layers = optimizer._executor._layer_of_bucket
    return found[0], found[1], [layers.count(layer) for layer in dict.fromkeys(layers)]


def placed_where_one_rank_has_less() -> str:
    """The kind of the error that this rank gets."""
    memory = "1KiB" if dist.get_rank() == dist.get_world_size() - 1 else "1GiB"
    try:
        hostward.AdamW(
            sharded(), lr=1e-2, offload_fraction="auto", device_memory=memory, backend=SimulatedBackend(threads=1)
        )
    except HostwardError as error:
        return type(error).__name__
    return "none"


class Wide(torch.nn.Module):
    """Several buckets on each rank; its inner part is gathered and reduced by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(*(torch.nn.Linear(320, 320, bias=False) for _ in range(5)))
        self.out = torch.nn.Linear(320, 320, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.out(self.inner(x).tanh())
        return out


def nested(fraction: float = 0.0, gradients: str | None = None) -> dict[str, Any]:
    """Weights, state and norms of two steps of two microbatches, in bf16 with sums in float32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Wide(), Wide()).to(torch.bfloat16)
    for part in (model[0].inner, model[0], model[1].inner, model[1], model):
        fully_shard(part, mesh=mesh_of("all"))
    told: dict[str, Any] = {"offload_fraction": fraction, "gradients": gradients, "grad_dtype": torch.float32}
    backend = SimulatedBackend(threads=1)
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=0.05, backend=backend, streamed_fraction=0.0, **told)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(2):
            torch.manual_seed(2 * step + microbatch)
            with optimizer.accumulate(last=microbatch == 1):
                model(torch.randn(4, 320, dtype=torch.bfloat16)).clone().float().square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.hex())
    return {"told": norms, "bits": snapshot(model, optimizer)}
