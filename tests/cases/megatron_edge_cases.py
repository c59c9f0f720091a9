"""Runs of Megatron-Core, stepped by hostward, that went wrong once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import megatron.core.optimizer.muon as muon
import megatron.core.optimizer.optimizer_config as optimizer_config
import megatron_cases as cases
import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.muon import get_megatron_muon_optimizer

import hostward.integrations.megatron as adapter
from hostward.runtime.backend import Lane
from hostward.runtime.simulated.backend import Order, SimulatedBackend

FLAGS = ("use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d")
LATE = frozenset(lane for lane in Lane if lane is not Lane.COMPUTE)


def use(**options: Any) -> None:
    """Have hostward step what is built from now on; all that may be late is."""
    adapter.use(backend=SimulatedBackend(order=Order(late=LATE), threads=1), **options)


def build(layout: str, **how: Any) -> cases.Run:
    """Megatron's flags of its CPU offloading, as its users set them."""
    fields = {**dict.fromkeys(FLAGS, True), "offload_fraction": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_config, "is_te_min_version", lambda *_, **__: False)
        return cases.build(layout, **{**fields, **how})


def masters_after_reload_of_one_made_before() -> list[float]:
    """The fp32 main weights of Megatron's own hybrid optimizer, made before `use`, whose weights became 0.25."""
    adapter.stop_using()
    run = build("single", offload_fraction=0.5)
    use()
    try:
        with torch.no_grad():
            for chunk in run.chunks:
                for weight in chunk.parameters():
                    weight.data.fill_(0.25)
        run.optimizer.reload_model_params()
    finally:
        adapter.stop_using()
    (hybrid,) = cases.inner_optimizers(run)
    return [float(each) for weight in hybrid.param_to_fp32_param.values() for each in (weight.min(), weight.max())]


def steps_of_a_part_alone() -> tuple[str, set[int]]:
    """What is raised if one part of a chain is stepped, and the step counts of all weights then."""
    use()
    run = build("ep2", clip_grad=0.0)
    chain = run.optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "step", chain.chained_optimizers[-1].step)
        with pytest.raises(adapter.OrderingError) as raised:
            cases.train(run, 1, microbatches=2)
    optimizer = chain.offloading.optimizer
    return str(raised.value), {optimizer.step_count(t.name) for t in optimizer.inventory.parameters}


def norms_of_halved_twice() -> list[list[float | None]]:
    """The norms where gradients are multiplied by a half twice, with early gradients and without."""
    found = []
    for early in (True, False):
        use(early_gradients=early)
        run = build("single", overlap=True)

        def halve(_: int, run: cases.Run = run) -> None:
            for chunk in [*run.chunks, *run.chunks]:
                chunk.scale_gradients(0.5)

        found.append(cases.train(run, 2, microbatches=2, before_step=halve).grad_norms)
    return found


def of_chunks_scaled_by_different_numbers() -> str:
    """What is raised where the gradients of two chunks are multiplied by different numbers, and leave early."""
    use()
    run = build("pp2-interleaved", overlap=True)

    def scale(_: int) -> None:
        for number, chunk in enumerate(run.chunks):
            chunk.scale_gradients(0.5 ** (1 + number))

    with pytest.raises(adapter.OrderingError) as raised:
        cases.train(run, 1, microbatches=2, before_step=scale)
    return str(raised.value)


def norms_after_a_step_that_raised() -> list[tuple[list[float | None], str]]:
    """Norms and weights where a step that is refused is made again, with its learning rate put right, and without."""
    found = []
    for refused in (True, False):
        use()
        run = build("single", overlap=True, model={"calculate_per_token_loss": True})

        def refuse(_: int, run: cases.Run = run) -> None:
            group = run.optimizer.param_groups[0]
            rate, group["lr"] = group["lr"], float("nan")
            with pytest.raises(adapter.ConfigError):
                run.optimizer.step()
            group["lr"] = rate

        told = cases.train(run, 2, microbatches=2, before_step=refuse if refused else lambda _: None)
        found.append((told.grad_norms, cases.digest(run.chunks)))
    return found


def load_of_other_groups() -> str:
    """What is raised where the groups of a state have other numbers of tensors, as megatron-core 0.16 hands them on."""
    use()
    run = build("single", distributed=False, use_precision_aware_optimizer=False)
    (part,) = cases.inner_optimizers(run)
    state = part.state_dict()
    first, *others = state["param_groups"]
    with pytest.raises(adapter.CheckpointError) as raised:
        part.load_state_dict({**state, "param_groups": [{**first, "params": first["params"][1:]}, *others]})
    return str(raised.value)


def norms_before_steps() -> tuple[list[float | None], list[float | None]]:
    """The norms that a chain tells before its steps, and with them, of gradients that are scaled by the step."""
    use()
    run, before = build("single", overlap=True, model={"calculate_per_token_loss": True}), []

    def tell(_: int) -> None:
        run.optimizer.prepare_grads()
        before.append(float(run.optimizer.get_grad_norm()))

    return before, cases.train(run, 2, microbatches=2, before_step=tell).grad_norms


def norms_of_scaled_gradients() -> list[list[float | None]]:
    """The norms where a rank has nothing of what leaves early, and gradients are scaled: early and not."""
    found = []
    for early in (True, False):
        use(early_gradients=early)
        large = cases.Data(vocabulary=4096)  # one rank of the last stage has a part of its output layer alone
        run = build("dp2-pp2", overlap=True, model={"calculate_per_token_loss": True}, data=large)
        found.append(cases.train(run, 2, microbatches=2).grad_norms)
    return found


def norms_of_an_optimizer_made_anew() -> tuple[list[Any], list[float | None], str, bool]:
    """Norms with two optimizers of one model, the second without early gradients, and with one.

    Also what is raised if the first one is stepped, and whether it goes when nobody has it any more.
    """
    per_token = {"calculate_per_token_loss": True}
    use()
    run = build("single", overlap=True, model=per_token)
    norms = cases.train(run, 1, microbatches=2).grad_norms
    first, offloading = run.optimizer, weakref.ref(run.optimizer.offloading)
    use(early_gradients=False)
    flags = {name: getattr(run.config, name) for name in FLAGS}
    _, run.optimizer = cases.make_optimizer(run.chunks, overlap=True, offload_fraction=1.0, **flags)
    norms += cases.train(run, 1, microbatches=2, first=1).grad_norms
    with pytest.raises(adapter.OrderingError) as raised:
        first.step()
    message = str(raised.value)
    del first, raised
    gc.collect()
    alone = cases.train(build("single", overlap=True, model=per_token), 2, microbatches=2).grad_norms
    return norms, alone, message, offloading() is None


def weights_without_their_optimizer() -> tuple[list[str], bool, list[str]]:
    """The bits of weights where the optimizer is kept, and where nobody has it after a step.

    Also whether it is still there then, or where the model is gone too, and methods of the chunk that are not its own.
    """
    use()
    found = []
    for kept in (True, False):
        run = build("single", overlap=True)
        cases.train(run, 1, microbatches=2)
        optimizer = weakref.ref(run.optimizer.offloading.optimizer)
        (chunk,) = run.chunks
        if not kept:
            run.optimizer = chunk.config.grad_scale_func = None
            gc.collect()
        cases.gather(run)
        found.append(cases.digest(run.chunks))
    whole = build("single")  # Megatron itself keeps model chunks that overlap
    cases.train(whole, 1, microbatches=2)
    without_model = weakref.ref(whole.optimizer.offloading.optimizer)
    del whole
    gc.collect()
    parts = (chunk, *chunk.bucket_groups, *chunk.buffers)
    changed = [name for each in parts for name in vars(each) if callable(getattr(type(each), name, None))]
    return (
        found,
        optimizer() is not None or without_model() is not None,
        [name for name in changed if name != "buffers"],
    )


def norms_of_megatrons_own_that_is_made_anew(*, stopped: bool) -> tuple[list[Any], list[float | None], str]:
    """Norms of Megatron's own optimizer, of a model that had hostward's, which somebody still has, and of one alone.

    Also what is raised if hostward's is stepped then. `stopped`: after `stop_using`.
    """
    per_token, own = {"calculate_per_token_loss": True}, {"use_precision_aware_optimizer": False}
    use()
    run = build("single", overlap=True, model=per_token)
    kept = run.optimizer
    if stopped:
        adapter.stop_using()
    _, run.optimizer = cases.make_optimizer(run.chunks, overlap=True)
    norms = cases.train(run, 1, microbatches=2).grad_norms
    with pytest.raises(adapter.OrderingError) as raised:
        kept.step()
    alone = build("single", overlap=True, model=per_token, offload_fraction=None, **own)
    return norms, cases.train(alone, 1, microbatches=2).grad_norms, str(raised.value)


def steps_without_cleared_gradients() -> list[str]:
    """What is raised by a second step with one backward, and by a backward that adds to gradients of the last step."""
    use()
    run = build("single", overlap=True)
    cases.train(run, 1, microbatches=2)
    with pytest.raises(adapter.OrderingError) as stepped:
        run.optimizer.step()
    run = build("single", overlap=True)
    cases.train(run, 1, microbatches=2)
    run.chunks[0].zero_grad_buffer = lambda: None
    with pytest.raises(adapter.OrderingError) as added:
        cases.train(run, 1, microbatches=2, first=1)
    return [str(stepped.value), str(added.value)]


def trained_on_after_a_refusal() -> dict[str, Any]:
    """What steps tell after another optimizer was refused for the same model chunks, and without that."""
    told: dict[str, Any] = {}
    for name in "without", "with":
        use()
        run = build("single", overlap=True)
        cases.train(run, 1)
        if name == "with":
            adapter.use(step_early=True, clip="megatron")
            with pytest.raises(adapter.ConfigError) as raised:
                cases.make_optimizer(run.chunks, overlap=True, offload_fraction=1.0, **dict.fromkeys(FLAGS, True))
            told["error"] = str(raised.value)
        told[name] = cases.train(run, 2, first=1).grad_norms
    return told


def clipping_before_a_step() -> list[str]:
    """What is raised where gradients are clipped by others than the step, after they may have been read."""
    use()
    run = build("single", overlap=True)
    found = []
    for clip in (run.optimizer.chained_optimizers[0].step, lambda: run.optimizer.clip_grad_norm(1.0)):
        with pytest.raises(adapter.OrderingError) as raised:
            cases.train(run, 1, microbatches=2, before_step=lambda _, clip=clip: clip())  # type: ignore[misc]
        found.append(str(raised.value))
    return found


def main_weights_of_a_checkpoint(**flags: Any) -> set[float]:
    """The fp32 main weights after a step that changes none; those of a checkpoint were 2**-20 above the weights."""
    use()
    run = build("single", lr=0.0, min_lr=0.0, weight_decay=0.0, **flags)
    named = dict(run.chunks[0].module.named_parameters())
    with torch.no_grad():
        for weight in named.values():
            weight.fill_(1.0)
    exact = {name: torch.full(weight.shape, 1.0 + 2.0**-20) for name, weight in named.items()}
    run.optimizer.reload_model_params(state_dict={"model": exact})
    cases.train(run, 1, microbatches=2)
    (part,) = cases.inner_optimizers(run)
    held = [p for group in part.param_groups for p in group["params"]]
    values = [part.state[p].get("master_param", p) for p in held]
    return {float(each) for value in values for each in (value.min(), value.max())}


def refusals() -> dict[str, str]:
    """What is raised, by what it has to name: of flags, and by functions that programs imported before `use`."""
    use()
    run = build("single")

    def refusal(*, of: Any = run.config, **asked: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in asked.items():
                patch.setattr(of, name, value, raising=False)
            with pytest.raises(adapter.ConfigError) as raised:
                adapter.require_supported(run.config, run.chunks)
        return str(raised.value)

    def of_other_optimizers(make: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "HAVE_EMERGING_OPTIMIZERS", True, raising=False)
            patch.setattr(run.config, "use_distributed_optimizer", False)  # they have no such one
            patch.setattr(run.config, "optimizer", "muon")
            with pytest.raises(adapter.ConfigError) as raised:
                make()
        return str(raised.value)

    def refusal_of_another_wrapper() -> str:
        class OtherDataParallel:
            ddp_config, config = run.chunks[0].ddp_config, run.chunks[0].config

        with pytest.raises(adapter.ConfigError) as raised:
            adapter.require_supported(run.config, [OtherDataParallel()])
        return str(raised.value)

    def refusal_of_a_bare_model() -> str:
        with pytest.raises(adapter.ConfigError) as raised:
            get_megatron_optimizer(run.config, [chunk.module for chunk in run.chunks])
        return str(raised.value)

    def refusal_of_gradients() -> str:
        def in_fp32(chunks: list[Any]) -> None:
            weight = next(chunks[0].parameters())
            weight.main_grad = weight.main_grad.float()

        with pytest.raises(adapter.ConfigError) as raised:
            build("single", ddp={"grad_reduce_in_fp32": False}, before_optimizer=in_fp32)
        return str(raised.value)

    ddp, own = run.chunks[0].ddp_config, run.chunks[0].config
    return {
        "grad_norm_skip_threshold": refusal(grad_norm_skip_threshold=1.0),
        "grad_norm_group": refusal(of=next(run.chunks[0].parameters()), grad_norm_group="mtp"),
        "gtp_weight_remat_size": refusal(of=own, gtp_weight_remat_size=2),
        "fp4_param_gather": refusal(of=ddp, fp4_param_gather=True),
        "fp8_param": refusal(of=own, fp8_param=True),
        "optimizer_cuda_graph": refusal(optimizer_cuda_graph=True),
        "Megatron-FSDP": refusal(of=ddp, use_megatron_fsdp=True),
        "OtherDataParallel": refusal_of_another_wrapper(),
        "GPTModel, a model chunk that is not wrapped": refusal_of_a_bare_model(),
        "qk_clip": refusal(of=own, qk_clip=True),
        "gradients in 2 dtypes": refusal_of_gradients(),
        "optimizer='muon'": refusal(optimizer="muon"),
        "Muon": of_other_optimizers(lambda: get_megatron_muon_optimizer(run.config, run.chunks)),
        "layer-wise": of_other_optimizers(lambda: LayerWiseDistributedOptimizer([], run.config)),
        "leave optimizer_cpu_offload out": of_other_optimizers(lambda: get_megatron_optimizer(run.config, run.chunks)),
    }


def load_of_a_legacy_format(path: str) -> str:
    """What is raised where state is loaded from a file of before February 2024, whatever is in it."""
    use()
    run = build("single", use_precision_aware_optimizer=False)
    torch.save({0: {torch.float32: {"param": []}}}, path)
    with pytest.raises(adapter.ModelError) as raised:
        run.optimizer.load_parameter_state(path, update_legacy_format=True)
    return str(raised.value)


def step_after_weights_were_moved() -> str:
    """What is raised where fp32 main weights lie elsewhere, as after Megatron's `restore_from_cpu` on a GPU."""
    use()
    run = build("single", use_precision_aware_optimizer=False)
    cases.train(run, 1, microbatches=2)
    for part in cases.inner_optimizers(run):
        for weight in part.param_groups[0]["params"]:
            weight.data = weight.data.clone()
    with pytest.raises(adapter.ModelError) as raised:
        cases.train(run, 1, microbatches=2, first=1)
    return str(raised.value)


def told_of_a_gradient_that_is_not_finite(clip: str) -> list[bool]:
    """Whether each of three steps is said to be made, of which the second one meets a NaN and is skipped."""
    use(clip=clip)
    run = build("single")

    def spoil(step: int) -> None:
        if step == 1:
            next(run.chunks[0].parameters()).main_grad.view(-1)[0] = float("nan")  # type: ignore[attr-defined]

    return cases.train(run, 3, microbatches=2, before_step=spoil).updated


def beside_a_frozen_stage(**model: Any) -> list[tuple[list[float | None], str]]:
    """Norms and the bits of weights where the first stage of two is frozen: Megatron's own, and at two fractions."""
    wrap = cases.DistributedDataParallel

    def frozen(config: Any, flags: Any, network: torch.nn.Module, **how: Any) -> Any:
        return wrap(config, flags, network.requires_grad_(dist.get_rank() > 0), **how)

    use()
    found = []
    for flags in (
        {"offload_fraction": None, "use_precision_aware_optimizer": False},
        {"offload_fraction": 0.0},
        {"offload_fraction": 1.0},
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cases, "DistributedDataParallel", frozen)
            run = build("pp2", overlap=True, model=model, **flags)
        norms = cases.train(run, 2, microbatches=2).grad_norms
        found.append((norms, cases.digest(run.chunks)))
    return found


def with_a_weight_in_fp32() -> list[tuple[list[float | None], str]]:
    """Norms and the bits of weights where one weight among 16-bit ones is fp32: Megatron's own, and ours."""
    wrap = cases.DistributedDataParallel

    def mixed(config: Any, flags: Any, network: torch.nn.Module, **how: Any) -> Any:
        network.last = torch.nn.Linear(64, 64, bias=False)  # the last one: its buffer is made after the other's
        torch.nn.init.constant_(network.last.weight, 0.01)
        network.register_forward_hook(lambda module, _, losses: losses + module.last(torch.ones(64)).square().mean())
        return wrap(config, flags, network, **how)

    use()
    found = []
    for flags in (
        {"offload_fraction": None, "use_precision_aware_optimizer": False},
        {"offload_fraction": 0.0},
        {"offload_fraction": 1.0},
        {"offload_fraction": 1.0, "use_precision_aware_optimizer": False},
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cases, "DistributedDataParallel", mixed)
            run = build("dp2", overlap=True, **flags)
        norms = cases.train(run, 2, microbatches=2).grad_norms
        found.append((norms, cases.digest(run.chunks)))
    return found


def waits_for_all_gradients() -> list[str]:
    """The weights whose gradients are changed after their reduction, where no process groups are those of the process.

    Programs may give Megatron groups of their own, and have no others.
    """

    def missing() -> int:
        raise AssertionError("group is not initialized")

    use()
    run = build("tp2", overlap=True, model={"sequence_parallel": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases.parallel_state, "get_tensor_model_parallel_world_size", missing)
        patch.setattr(cases.parallel_state, "get_pipeline_model_parallel_world_size", missing)
        assert run.optimizer.offloading.optimizer
    return [shard.name for shard in run.optimizer.offloading._shards.values() if shard.changed_later]


def takes_early(**ddp: Any) -> bool:
    """Whether gradients are taken as bucket groups are reduced, with these flags of data parallelism."""
    use()
    early: bool = build("dp2", overlap=True, ddp=ddp).optimizer.offloading.early
    return early


def norms_with_gradients_beside_buffers() -> list[list[float | None]]:
    """The norms where gradients are added up beside the buffers, and are there when a reduction is over: early and not.

    So do newer versions by `param_name_patterns_for_fp32_local_accumulation`.
    """

    def beside(chunks: list[Any]) -> None:
        for group in [group for chunk in chunks for group in chunk.bucket_groups]:
            params = [p for bucket in group.buckets for p in bucket.params_list]
            for p in params:
                p.main_grad_copy_in_grad_buffer, p.main_grad = p.main_grad, torch.zeros_like(p.main_grad)
            start, finish = group.start_grad_sync, group.finish_grad_sync

            def started(*args: Any, start: Any = start, params: Any = params, **how: Any) -> None:
                for p in params:
                    p.main_grad_copy_in_grad_buffer.copy_(p.main_grad)
                start(*args, **how)

            def finished(*args: Any, finish: Any = finish, params: Any = params, **how: Any) -> None:
                finish(*args, **how)
                for p in params:
                    p.main_grad.copy_(p.main_grad_copy_in_grad_buffer)

            group.start_grad_sync, group.finish_grad_sync = started, finished

    found = []
    for early in (True, False):
        # Copies that are made at once have what is there when a gradient is taken.
        adapter.use(backend=SimulatedBackend(order=Order(eager=True), threads=1), early_gradients=early)
        run = build("dp2", overlap=True, before_optimizer=beside)
        found.append(cases.train(run, 2, microbatches=2).grad_norms)
    return found


def norms_after_a_forward_that_raised() -> list[list[float | None]]:
    """The norms of a run whose second forward is interrupted and made again, and of one that is not interrupted."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    found = []
    for interrupted in (True, False):
        use()
        run = build("single", overlap=True)
        norms = cases.train(run, 1, microbatches=2).grad_norms
        if interrupted:
            hook = run.chunks[0].module.decoder.layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                cases.train(run, 1, first=1, microbatches=2)
            hook.remove()
            for group in run.chunks[0].bucket_groups:
                group.is_last_microbatch = True  # Megatron's schedule was in `no_sync`
        found.append(norms + cases.train(run, 1, first=1, microbatches=2).grad_norms)
    return found


def norms_of_groups() -> object:
    """What a chain says after a step of norms that newer versions compute besides the one of all gradients."""
    use()
    run = build("single")
    cases.train(run, 1, microbatches=2)
    return run.optimizer.grad_norms_by_group


class LateClearing(adapter._Clearing):
    """Clears each buffer at the last moment at which a stream beside forward may."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.left: list[Any] = []

    def clear(self, gradients: torch.Tensor, clear: Any) -> None:
        super().clear(gradients, lambda: None)
        self.left.append(clear)

    def finish(self) -> None:
        super().finish()
        left, self.left = self.left, []
        for clear in left:
            clear()


def cleared_late(written: bool = False, hooked: bool = True) -> list[Any]:
    """Norms of a run whose gradients are cleared at once, and of one whose are cleared as late as may be.

    `written`: somebody writes a gradient before forward. `hooked`: forward's end is noticed.
    """
    found: list[Any] = []
    for clearing in (adapter._Clearing, LateClearing):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "_Clearing", clearing)
            use()
            run = build("single", overlap=True)
        offloading = run.optimizer.offloading
        if not hooked:
            for hook in offloading._changes.hooks:
                hook.remove()
        try:
            norms = cases.train(run, 2, microbatches=2).grad_norms
            if written:
                for chunk in run.chunks:
                    chunk.zero_grad_buffer()
                    next(chunk.parameters()).main_grad.fill_(1.0)
                    chunk.zero_grad_buffer = lambda: None
            found.append(norms + cases.train(run, 2, first=2, microbatches=2).grad_norms)
        except adapter.OrderingError as error:
            found.append(str(error))
        adapter.stop_using()
    return found


def zeroed_in_place(place: str) -> list[tuple[list[float | None], str]]:
    """Norms and the bits of weights where gradients are set to None, and where zeros are written to them.

    `place`: when zeros are written, "before" or "after" buffers are cleared, or by the "inner" optimizers.
    """
    found = []
    for in_place in (False, True):
        use(streamed_fraction=1.0)
        run = build("single", overlap=True)
        if in_place:
            _zero_in_place(run, place)
        norms = cases.train(run, 3, microbatches=2).grad_norms
        run.optimizer.offloading.optimizer.wait()
        cases.gather(run)
        found.append((norms, cases.digest(run.chunks)))
    return found


def _zero_in_place(run: cases.Run, place: str) -> None:
    """Let `train` write zeros."""
    (chunk,), zero = run.chunks, run.optimizer.zero_grad
    clear = chunk.zero_grad_buffer
    if place == "after":
        run.optimizer.zero_grad = lambda: zero(set_to_none=False)
        return

    def cleared() -> None:
        if place == "before":
            zero(set_to_none=False)
        else:
            for part in cases.inner_optimizers(run):
                part.zero_grad(set_to_none=False)
        clear()

    chunk.zero_grad_buffer = cleared
