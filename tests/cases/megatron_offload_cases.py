"""Cases for ranks that train with Megatron-Core and hostward's step; each returns plain data for `megatron_ranks`."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import megatron_cases as cases
import pytest
import torch

import hostward
import hostward.integrations.megatron as integration
from hostward.errors import HostwardError
from hostward.optim.step_executor import StepExecutor
from hostward.runtime.backend import Lane
from hostward.runtime.simulated.backend import Order, SimulatedBackend

LATE: Mapping[str, frozenset[Lane]] = {
    "d2h": frozenset({Lane.D2H}),
    "h2d": frozenset({Lane.H2D}),
    "host": frozenset({Lane.HOST}),
    "update": frozenset({Lane.UPDATE}),
    "all": frozenset(lane for lane in Lane if lane is not Lane.COMPUTE),
    "none": frozenset(),
}
PRECISE = {"use_precision_aware_optimizer": True, "overlap_cpu_optimizer_d2h_h2d": True}
OVERLAPPED = {**PRECISE, "overlap": True}


def built(
    layout: str, fraction: float | None, *, late: str = "all", use: Mapping[str, Any] | None = None, **how: Any
) -> cases.Run:
    """The model and optimizer of a layout: hostward's at a fraction, Megatron's own on the device for None."""
    backend = SimulatedBackend(order=Order(late=LATE[late], eager=late == "none"), threads=1)
    integration.use(backend=backend, **(use or {}))
    try:
        return cases.build(layout, offload_fraction=fraction, **how)
    finally:
        integration.stop_using()


def told_by(run: cases.Run, told: cases.Told) -> dict[str, Any]:
    """What equal runs have in common."""
    for part in cases.inner_optimizers(run):
        if isinstance(part, integration.OffloadedHybrid):
            part.shared.optimizer.wait()
    cases.gather(run)
    return {
        "digest": cases.digest(run.chunks),
        "losses": told.losses,
        "grad_norms": told.grad_norms,
        "updated": told.updated,
    }


def trained(
    layout: str,
    ways: Sequence[Mapping[str, Any]],
    *,
    steps: int = 3,
    microbatches: int = 2,
    without: Sequence[str] = (),
    **how: Any,
) -> list[dict[str, Any]]:
    """What each way told, in turn: options of `built`, with its fraction. `without`: waits that are left out."""
    found = []
    for way in ways:
        options = {**how, **way}
        with left_out(without):
            run = built(layout, options.pop("fraction"), **options)
            parts = [p for p in cases.inner_optimizers(run) if isinstance(p, integration.OffloadedHybrid)]
            guessed: list[int] = []

            def count(_: int, parts: list[Any] = parts, guessed: list[int] = guessed) -> None:
                """Count the buckets that are being stepped, before the step."""
                executors = [part.shared.optimizer._executor for part in parts[:1]]
                guessed += [sum(bucket.guessed for bucket in each._buckets) for each in executors]

            found.append(told_by(run, cases.train(run, steps, microbatches=microbatches, before_step=count)))
            found[-1]["guessed"] = guessed
        if parts:
            plan = parts[0].shared.optimizer.plan
            found[-1]["placed"] = plan.placed_fraction
            found[-1]["layers"] = list(dict.fromkeys(b.layer for b in parts[0].shared.optimizer.inventory.buckets))
            found[-1]["one optimizer"] = all(p.shared is parts[0].shared for p in parts)
    return found


@contextlib.contextmanager
def left_out(waits: Sequence[str]) -> Iterator[None]:
    """Methods of the executor that do nothing meanwhile, and errors that would tell of it."""
    nothing = dict.fromkeys(waits, lambda *_, **__: None)
    if waits:
        nothing["require_used"] = lambda *_: None
    kept = {name: getattr(StepExecutor, name) for name in nothing}
    for name, empty in nothing.items():
        setattr(StepExecutor, name, empty)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(StepExecutor, name, method)


def resumed(
    layout: str, folder: str, saved: float | None, ways: Sequence[float | None], form: str, how: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A run that saves after two of four steps and goes on, and then one that loads this, for each way."""
    run = built(layout, saved, **how)
    cases.train(run, 2, microbatches=2)
    cases.save(run, folder, form)
    found = [told_by(run, cases.train(run, 2, first=2, microbatches=2))]
    for fraction in ways:
        run = built(layout, fraction, **how, seed=2)
        cases.load(run, folder)
        found.append(told_by(run, cases.train(run, 2, first=2, microbatches=2)))
    return found


def saved(layout: str, folder: str, form: str, how: Mapping[str, Any]) -> State:
    """The state of two steps that were made with half of it offloaded, and saved."""
    run = built(layout, 0.5, **how)
    cases.train(run, 2, microbatches=2)
    cases.save(run, folder, form)
    return state_of(run)


def loaded(layout: str, folder: str, how: Mapping[str, Any]) -> State:
    """The state of a run of other weights, with all state offloaded, that has loaded this, and trains on."""
    run = built(layout, 1.0, seed=2, **how)
    cases.load(run, folder)
    found = state_of(run)
    cases.train(run, 1, first=2, microbatches=2)
    return found


State = tuple[dict[tuple[int, int, str, str], int], tuple[int, int, str]]


def state_of(run: cases.Run) -> State:
    """For each weight of this rank's stage, sums of the bits of its state, by element; those of all shards add up.

    Also the bits of the stage's weights.
    """
    stage = (
        cases.parallel_state.get_tensor_model_parallel_rank(),
        cases.parallel_state.get_pipeline_model_parallel_rank(),
    )
    names, found = {weight: name for name, weight in cases.named_weights(run.chunks)}, {}
    for part in run.optimizer.chained_optimizers:
        for weight in part.model_param_group_index_map:
            buffer, dtype, bucket = part.model_param_gbuf_map[weight]
            mine = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][weight]["param"]
            for key, value in part._get_main_param_and_optimizer_states(weight).items():
                if key != "step":
                    bits = value.detach().view(-1).view(torch.int32).long()
                    found[*stage, names[weight], key] = int((bits * torch.arange(mine.start + 1, mine.end + 1)).sum())
    return found, (*stage, cases.digest(run.chunks))


def weights_are_reloaded(layout: str, how: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Weights that are set between two steps, and told of by `reload_model_params`, or as Megatron Bridge does it."""
    found = []
    for fraction, told_of in ((0.0, megatron_reloads), (1.0, megatron_reloads), (1.0, bridge_reloads)):
        run = built(layout, fraction, **how)
        cases.train(run, 2, microbatches=2)
        with torch.no_grad():
            for _, weight in cases.named_weights(run.chunks):
                weight.mul_(0.5)
        told_of(run)
        found.append(told_by(run, cases.train(run, 1, first=2, microbatches=2)))
    return found


def megatron_reloads(run: cases.Run) -> None:
    """Have main weights taken anew from the weights."""
    run.optimizer.reload_model_params()


def bridge_reloads(run: cases.Run) -> None:
    """The same in two steps, which Megatron Bridge carries out by itself when it has loaded weights."""
    for part in run.optimizer.chained_optimizers:
        if not hasattr(part, "shard_fp32_from_float16_groups"):
            part.reload_model_params()  # Bridge leaves other optimizers than the distributed one to Megatron
            continue
        for weights, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for weight, shard in zip(weights, shards, strict=True):
                if shard is not None:
                    mine = part._get_model_param_range_map(weight)["param"]
                    shard.data.copy_(weight.view(-1)[mine.start : mine.end])
        part.optimizer.update_fp32_param_by_new_param()


def refused(layout: str, **how: Any) -> str:
    """The error of building an optimizer."""
    try:
        built(layout, 1.0, **how)
    except (HostwardError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stepped_alone() -> str:
    """The error of stepping one of two parts of a chain."""
    run = built("single", 1.0, **PRECISE, model={"num_moe_experts": 4, "moe_router_topk": 2})
    cases.train(run, 1)
    first = run.optimizer.chained_optimizers[0]
    try:
        first.step_with_ready_grads()
        first.step_with_ready_grads()
    except (HostwardError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def without_a_name() -> str:
    """The error of `use` where Megatron lacks a method."""
    group = integration.importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    held = group._ParamAndGradBucketGroup
    method = held.start_param_sync
    del held.start_param_sync
    try:
        integration.use()
    except (HostwardError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        held.start_param_sync = method
        integration.stop_using()
    return "nothing"


def crossed(layout: str, folder: str, own_saves: bool, form: str, how: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run by one of hostward and Megatron's hybrid optimizer that goes on by the other, and one that stays."""

    def made(own: bool) -> cases.Run:
        return cases.build(layout, offload_fraction=0.5, **how) if own else built(layout, 0.5, **how)

    run = made(own_saves)
    cases.train(run, 2, microbatches=2)
    cases.save(run, folder, form)
    stays = told_by(run, cases.train(run, 2, first=2, microbatches=2))
    run = made(not own_saves)
    cases.load(run, folder)
    return [stays, told_by(run, cases.train(run, 2, first=2, microbatches=2))]


def attached(layout: str, model: Mapping[str, Any], **how: Any) -> list[tuple[str, int, int, list[str]]]:
    """Of runs without and with offloaded activations: the bits, the bytes that left and those of them that were freed.

    Also the layers that flags name. `how`: options of `hostward.Activations`.
    """
    found = []
    for offloaded in (False, True):
        run = built(layout, 1.0, **OVERLAPPED, model=model)
        if not offloaded:
            found.append((told_by(run, cases.train(run, 2))["digest"], 0, 0, []))
            continue
        with integration.attach(run.chunks, run.optimizer) as by_flags:
            named = [name.rpartition("decoder.")[2] for name in by_flags.layers]
        asked = hostward.Activations(min_bytes=0, **how)
        with integration.attach(run.chunks, run.optimizer, activations=asked) as attachment:
            told = told_by(run, cases.train(run, 2))
            report = attachment.report()
            found.append((told["digest"], report.offloaded_bytes, report.freed_bytes, named))
    return found


def attach_is_refused(activations: int | None = None, **flags: Any) -> str:
    """What is raised if activations are to be offloaded with these flags of the model."""
    run = built("single", 1.0, **OVERLAPPED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in flags.items():
            patch.setattr(run.chunks[0].config, name, value)
        with pytest.raises(HostwardError) as raised:
            integration.attach(run.chunks, run.optimizer, activations=activations)
    return str(raised.value)


def weights_are_refused() -> str:
    """What is raised if weights of its layers are to be offloaded."""
    (chunk,) = built("single", 1.0, **OVERLAPPED).chunks
    with pytest.raises(HostwardError) as raised:
        hostward.attach(
            chunk, weights=hostward.Weights(num_layers=1, min_elements=0), layers=chunk.module.decoder.layers
        )
    return str(raised.value)


HALF_WAY = "decoder.layers.0.mlp.linear_fc1.weight"
"""A weight whose last chunk of the norm is cut between two ranks, and among four."""


def given_gradient(p: Any, name: str, step: int) -> torch.Tensor:
    """The whole gradient of a weight, the same in every layout: it may depend on its stage and on which part it is.

    That of step 0 has a sum of squares half-way between those of two fp32 norms, but for values that are too small to
    be counted in a chunk that has the others in it.
    """
    made = torch.zeros(p.numel())
    if step == 0:
        if name == HALF_WAY:
            chunk = made.split(4096)[p.numel() // 4096 - 1]
            chunk[:4], chunk[-1000:] = torch.tensor([1.0, 2.0**-12, 2.0**-12, 2.0**-24]), 2.0**-26
        return made
    ranks = [cases.parallel_state.get_pipeline_model_parallel_rank()]
    if getattr(p, "tensor_model_parallel", False):
        ranks.append(cases.parallel_state.get_tensor_model_parallel_rank())
    if not getattr(p, "allreduce", True):
        ranks.append(cases.parallel_state.get_expert_model_parallel_rank())
    of = torch.Generator().manual_seed(zlib.crc32(f"{name} {ranks} {step}".encode()))
    return made.normal_(generator=of)


def stepped(layout: str, *, told: bool = True, **how: Any) -> tuple[list[float | None], State, int]:
    """Norms and state of three steps with given gradients, and how many chunks of the norm ranks share.

    `told`: whether hostward knows how weights are cut.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not told:
            patch.setattr(integration.Offloading, "_flat_shards", lambda _: [])
        run = built(layout, 0.5, **how)
        patch.setattr(integration, "FlatShards", None)  # what is exchanged is, when the optimizer is made
        norms = [_stepped(run, step) for step in range(3)]
    cases.gather(run)
    return norms, state_of(run), sum(len(each.shared_chunks()) for each in run.optimizer.offloading._cut)


def _stepped(run: cases.Run, step: int) -> float | None:
    cases.gather(run)
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
        run.optimizer.offloading.wait_until_cleared()
        for name, p in chunk.module.named_parameters():
            p.main_grad.view(-1).copy_(given_gradient(p, name, step))
    for chunk in run.chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
        chunk.finish_grad_sync()
    run.optimizer.zero_grad()
    norm: float | None = run.optimizer.step()[1]
    return norm
