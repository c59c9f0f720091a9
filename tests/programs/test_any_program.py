"""What a program reads and writes around the step is what it would be without offloading.

Every program runs as its users write it: no `wait_for_weights()`, no `wait()`. With everything on the device, and with
state on the host, streamed, mixed, and with weights away, under orders in which nothing runs before somebody waits for
it.

Seen red: the fence left out (a test of its own, for each program); weights of device buckets not waited for; the fence
not lowered in forward; `.data` without its witness; kept views without their count, or without a comparison of bits;
copies run within the transform, the fake tensors or the trace that waits for them; a layer freed while it ran (a crash)
because it had been read before.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from networks import LATEST, MIXES, OFFLOADED, Net, loss_of, make, microbatch, stepped, tokens
from optimizer_cases import adamw, assert_equal, snapshot
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hostward
from hostward.errors import ModelError
from hostward.model.fence import FencedParameter
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

Kept = dict[str, Any]
"""What a program keeps from step to step; what it has seen is in `seen`."""


def see(kept: Kept, *tensors: torch.Tensor) -> None:
    kept.setdefault("seen", []).extend(t.detach().clone() for t in tensors)


def params(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(model.parameters())


# ---------------------------------------------------------------- programs, as their users write them


def swa(model: Net, kept: Kept) -> None:
    average = kept.setdefault("average", None) or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    kept["average"] = average
    average.update_parameters(model)
    see(kept, *average.parameters())


def swa_mean(model: Net, kept: Kept) -> None:
    kept["average"] = average = kept.get("average") or AveragedModel(model)
    average.update_parameters(model)
    see(kept, *average.parameters())


@torch.no_grad()
def ema_by_hand(model: Net, kept: Kept) -> None:
    shadow = kept.setdefault("shadow", {n: torch.zeros_like(p) for n, p in model.named_parameters()})
    for name, p in model.named_parameters():
        shadow[name].mul_(0.9).add_(p, alpha=0.1)
    see(kept, *shadow.values())


def ema_of_data(model: Net, kept: Kept) -> None:
    shadow = kept.setdefault("shadow", [torch.zeros_like(p) for p in model.parameters()])
    for s, p in zip(shadow, model.parameters(), strict=True):
        s.data = 0.9 * s.data + 0.1 * p.data
    see(kept, *shadow)


def norms(model: Net, kept: Kept) -> None:
    see(kept, *[p.norm() for p in model.parameters()], torch.nn.utils.get_total_norm(params(model)))
    see(kept, *torch._foreach_norm(params(model)), torch.stack([p.detach().abs().max() for p in model.parameters()]))


def deep_copies(model: Net, kept: Kept) -> None:
    twin = copy.deepcopy(model)
    assert all(type(p) is torch.nn.Parameter for p in twin.parameters())
    see(kept, *twin.parameters(), copy.deepcopy(model.head.weight))
    see(kept, twin(tokens(3)))


def named_dict(model: Net, kept: Kept) -> None:
    see(kept, *dict(model.named_parameters()).values())


def safetensors_file(model: Net, kept: Kept) -> None:
    data = safetensors.torch.save({n: p.data for n, p in model.named_parameters()})
    found = safetensors.torch.load(data)
    see(kept, *[found[name] for name in sorted(found)])


def torch_save(model: Net, kept: Kept) -> None:
    file = io.BytesIO()
    torch.save(params(model), file)
    file.seek(0)
    see(kept, *torch.load(file, weights_only=True))


def state_dicts(model: Net, kept: Kept) -> None:
    see(kept, *model.state_dict().values(), *model.blocks[1].state_dict().values())


def vectors(model: Net, kept: Kept) -> None:
    vector = parameters_to_vector(model.parameters())
    see(kept, vector)
    vector_to_parameters(vector * 0.99, model.parameters())


def numpy_reads(model: Net, kept: Kept) -> None:
    see(kept, torch.tensor([float(p.detach().float().numpy().sum()) for p in model.parameters()]))
    see(kept, torch.tensor(model.head.bias.tolist()), torch.tensor(model.scale.item()))


@torch.no_grad()
def clamp(model: Net, kept: Kept) -> None:
    for p in model.parameters():
        p.clamp_(-0.12, 0.12)


def clamp_of_data(model: Net, kept: Kept) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.12, 0.12)


@torch.no_grad()
def foreach_decay(model: Net, kept: Kept) -> None:
    torch._foreach_mul_(params(model), 0.99)


def another_optimizer(model: Net, kept: Kept) -> None:
    """Decays the same weights, as a "weight decay only" optimizer of its own."""
    decay = torch.optim.SGD([model.head.weight, model.blocks[0].up.weight], lr=0.1, weight_decay=0.1)
    for p in decay.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype or p.dtype)
    decay.step()
    decay.zero_grad()


def weight_sync(model: Net, kept: Kept) -> None:
    second = kept.setdefault("second", Net(model.head.weight.dtype))
    for q, p in zip(second.parameters(), model.parameters(), strict=True):
        q.data.copy_(p.data)
    see(kept, *second.parameters(), second(tokens(4)))


def weight_sync_by_state(model: Net, kept: Kept) -> None:
    second = kept.setdefault("second", Net(model.head.weight.dtype))
    second.load_state_dict(model.state_dict())
    see(kept, second(tokens(4)))


def another_thread(model: Net, kept: Kept) -> None:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(p.detach().clone() for p in model.parameters()))
    thread.start()
    thread.join()
    see(kept, *found)


def functional(model: Net, kept: Kept) -> None:
    with torch.no_grad():
        see(kept, torch.func.functional_call(model, dict(model.named_parameters()), (tokens(5),)))


def views_made_now(model: Net, kept: Kept) -> None:
    with torch.no_grad():
        flat = [p.view(-1) for p in model.parameters()]
        rows = [p.detach()[:1] for p in model.parameters()]
        see(kept, *flat, *rows, model.head.weight.t())


def views_kept(model: Net, kept: Kept) -> None:
    """Handed out once, before the first step, and read after each."""
    see(kept, *kept["views"])


def written_through_views_kept(model: Net, kept: Kept) -> None:
    for view in kept["views"]:
        view.clamp_(-0.12, 0.12)


def written_by_numpy(model: Net, kept: Kept) -> None:
    array = model.head.weight.detach().float().numpy() if model.head.weight.dtype is torch.bfloat16 else None
    array = model.head.weight.detach().numpy() if array is None else array
    kept["array"] = array
    see(kept, torch.from_numpy(array))
    array *= 0.5


def inference(model: Net, kept: Kept) -> None:
    with torch.inference_mode():
        see(kept, torch.cat([p.flatten() for p in model.parameters()]).sum())
        see(kept, model(tokens(6)))


def forward_alone(model: Net, kept: Kept) -> None:
    """`forward` itself, without the module's call: hooks of the module do not run, those of its parts do."""
    see(
        kept,
        model.forward(tokens(6)),
        model.head.forward(model.norm.forward(torch.ones(2, 32, dtype=model.scale.dtype))),
    )


def assigned(model: Net, kept: Kept) -> None:
    model.head.weight.data = model.head.weight.data * 0.9
    with torch.no_grad():
        model.scale.copy_(model.scale * 1.01)


def set_by_index(model: Net, kept: Kept) -> None:
    with torch.no_grad():
        model.head.weight[0] = 0.0
        model.embed.weight[3, 2:5] += 1.0
    model.blocks[0].up.weight.data[1].zero_()


def transformed(model: Net, kept: Kept) -> None:
    """Gradients of inputs, a batch and second derivatives, by transforms whose function reads weights."""
    x = torch.linspace(-1.0, 1.0, 32, dtype=model.scale.dtype)
    see(kept, torch.func.grad(lambda x: (model.head.weight @ x).square().sum())(x))
    see(kept, torch.func.grad(lambda x: (model.blocks[1].up.weight.data @ x).square().sum())(x))
    see(kept, torch.vmap(lambda x: torch.tanh(model.blocks[0].up.weight @ x))(torch.stack([x, -x])))
    see(kept, torch.func.hessian(lambda x: (model.blocks[2].up.weight @ x).square().sum())(x))


def initialised(model: Net, kept: Kept) -> None:
    torch.manual_seed(7)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    torch.nn.init.zeros_(model.blocks[2].down.bias)


def collectives(model: Net, kept: Kept) -> None:
    for p in model.parameters():
        dist.broadcast(p.data, 0)
        dist.all_reduce(p.data)
    gathered = [torch.empty_like(model.head.weight)]
    dist.all_gather(gathered, model.head.weight.detach())
    see(kept, *gathered)


def collectives_of_parameters(model: Net, kept: Kept) -> None:
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, 0)
            dist.all_reduce(p)
    see(kept, *model.parameters())


PROGRAMS: dict[str, Callable[[Net, Kept], None]] = {
    p.__name__: p
    for p in (
        swa, swa_mean, ema_by_hand, ema_of_data, norms, deep_copies, named_dict, safetensors_file, torch_save,
        state_dicts, vectors, numpy_reads, clamp, clamp_of_data, foreach_decay, another_optimizer, weight_sync,
        weight_sync_by_state, another_thread, functional, views_made_now, views_kept, written_through_views_kept,
        inference, forward_alone, assigned, set_by_index, transformed, initialised, collectives,
        collectives_of_parameters,
    )
}  # fmt: skip
KEEP_VIEWS = {"views_kept", "written_through_views_kept"}
WAITS_BY_ITSELF = {"state_dicts", "weight_sync_by_state", "functional", "forward_alone"}
"""What module hooks alone let wait."""
ASSIGNS = {"vectors"}
"""What gives a weight other memory, which a weight that comes and goes refuses."""


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(
    program: str,
    mix: str,
    *,
    dtype: torch.dtype = torch.float32,
    context: bool = True,
    order: Order | None = None,
    away: bool = False,
    moment: str = "after step",
    microbatches: int = 1,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """What a program saw in three steps, and the weights and state after them."""
    if away:
        options = {"offload_fraction": 1.0, "streamed_fraction": 0.0, **options}
    model, optimizer = make(mix, dtype, order, grad_dtype=None if dtype is torch.float32 else torch.float32, **options)
    kept: Kept = {"views": [p.data for p in model.parameters()]} if program in KEEP_VIEWS else {}
    attached = hostward.attach(model, optimizer, weights=2, layers=list(model.blocks)) if away else None
    for step in range(3):
        optimizer.zero_grad()
        for i in range(microbatches):
            with microbatch(optimizer, context, i == microbatches - 1):
                loss_of(model, step * microbatches + i).backward()
        if moment == "before step":
            PROGRAMS[program](model, kept)
        optimizer.step()
        if moment == "after step":
            PROGRAMS[program](model, kept)
        if moment == "after evaluation":
            with torch.no_grad():
                model(tokens(8))
            PROGRAMS[program](model, kept)
    seen = {f"seen {i}": t for i, t in enumerate(kept.get("seen", []))}
    if attached is not None:
        attached.detach()
    return seen | snapshot(model, optimizer)


@functools.cache
def expected(program: str, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    """Without offloading and in one order. With the context and without it bits are the same, so one run is enough."""
    return run(program, "device", dtype=dtype, order=Order(eager=True), **options)


def turn(program: str, of: int, start: int = 0) -> int:
    """A number below `of` that goes round from program to program: where each program meets one case of several, each
    case meets many programs.
    """
    return (list(PROGRAMS).index(program) + start) % of


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_sees_and_changes_what_it_would_without_offloading(program: str) -> None:
    """At every placement; with the context at two of them, and without it at the others."""
    for at, mix in enumerate(MIXES):
        assert_equal(run(program, mix, context=turn(program, 2, at) == 0, order=LATEST), expected(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_16_bit_weights(program: str) -> None:
    mix = ("host", "mixed")[turn(program, 2)]
    assert_equal(run(program, mix, dtype=torch.bfloat16, order=LATEST), expected(program, dtype=torch.bfloat16))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("moment", ["before step", "after evaluation"])
def test_at_other_moments(program: str, moment: str) -> None:
    """Nothing may be on its way then, and a write through `.data` is seen all the same."""
    if program == "another_optimizer" and moment == "before step":
        return  # it would clear gradients that are about to be stepped with
    mix = ("device", "host", "mixed")[turn(program, 3)]
    assert_equal(run(program, mix, order=LATEST, moment=moment), expected(program, moment=moment))


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_weights_away(program: str) -> None:
    context = turn(program, 2) == 0
    if program in ASSIGNS:
        with pytest.raises(ModelError, match="was replaced"):
            run(program, "host", context=context, order=LATEST, away=True)
        return
    assert_equal(run(program, "host", context=context, order=LATEST, away=True), expected(program))


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in WAITS_BY_ITSELF])
def test_without_the_fence_it_is_wrong(program: str) -> None:
    """The negative control of all of these."""
    found = run(program, "host", order=LATEST, fence=False)
    with pytest.raises(AssertionError):
        assert_equal(found, expected(program))


OTHERS = (Lane.D2H, Lane.HOST, Lane.H2D, Lane.UPDATE)
LATE_SETS = [frozenset(lanes) for n in range(5) for lanes in itertools.combinations(OTHERS, n)]


@pytest.mark.parametrize("mix", OFFLOADED)
def test_every_late_order(mix: str) -> None:
    """A program that reads and one that writes in turn; at the next placement the two are the other way round."""
    for at, order in enumerate([*(Order(late=late) for late in LATE_SETS), Order(seed=0), Order(seed=1)]):
        program = ("ema_by_hand", "clamp_of_data")[(at + OFFLOADED.index(mix)) % 2]
        assert_equal(run(program, mix, order=order, microbatches=2), expected(program, microbatches=2))
    summed: dict[str, Any] = {"microbatches": 2, "gradients": "host"}
    assert_equal(run("norms", mix, order=LATEST, **summed), expected("norms", **summed))


# ---------------------------------------------------------------- what the fence is, and is not


def test_what_reads_nothing_lets_nothing_arrive() -> None:
    model, optimizer, heard = stepped("host")
    optimizer.zero_grad()
    model.zero_grad()
    for p in model.parameters():
        assert (p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, p.grad, p.numel()) is not None
        p.requires_grad_(True)
        torch.zeros_like(p)
        hash(p)
    assert heard.arrived() == []
    model.blocks[0].up.weight.norm()
    assert heard.arrived()
    assert "0007.head" not in heard.arrived()


def test_within_forward_weights_are_plain() -> None:
    """So their operations cost nothing more, and compiled code finds the class that it was compiled for."""
    model, optimizer = make("host", order=LATEST)
    seen: list[type] = []
    for block in model.blocks:
        block.fail = lambda block=block: seen.extend(type(p) for p in block.parameters())
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(seen) == {torch.nn.Parameter}
    assert {type(p) for p in model.parameters()} == {FencedParameter}
    assert repr(model.head.bias).startswith("Parameter containing")


def test_the_fence_goes_with_its_optimizer() -> None:
    model, optimizer = make("host", order=LATEST)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    gone, parameter = weakref.ref(optimizer), weakref.ref(model.head.weight)
    del optimizer
    gc.collect()
    assert gone() is None
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    del model
    gc.collect()
    assert parameter() is None


def of_two_optimizers(mix: str, order: Order) -> dict[str, torch.Tensor]:
    model, first = make(mix, order=order)
    for step in range(4):
        if step == 1:
            second = adamw(model, backend=SimulatedBackend(threads=1, order=order), **MIXES[mix])
        optimizer = second if step in (1, 2) else first
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, first)


@pytest.mark.parametrize("mix", OFFLOADED)
def test_a_second_optimizer_is_made_of_the_weights_that_the_first_has_stepped(mix: str) -> None:
    """Two trainers of one model. Seen red: main weights that are a step old, in the second and then in the weights."""
    assert_equal(of_two_optimizers(mix, LATEST), of_two_optimizers("device", Order(eager=True)))


def test_a_parameter_made_of_a_weight_and_classes_made_of_its_class() -> None:
    model, optimizer = make("host", order=LATEST)
    loss_of(model, 0).backward()
    optimizer.step()
    same = torch.nn.Parameter(model.head.weight, requires_grad=False)
    made = type(model.head.weight)(torch.ones(3))
    assert torch.equal(same, model.head.weight)
    assert same.data_ptr() == model.head.weight.data_ptr()
    assert not same.requires_grad
    assert made.detach().sum() == 3.0
    assert type(made) is torch.nn.Parameter


@pytest.mark.parametrize("mix", ["host", "mixed"])
def test_compiled_code_that_reads_weights(mix: str) -> None:
    def total(weights: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([w.square().sum() for w in weights]).sum()

    totals: list[list[torch.Tensor]] = []
    for each, order in (("device", Order(eager=True)), (mix, LATEST)):
        torch.compiler.reset()
        compiled = torch.compile(total, backend="eager")
        model, optimizer = make(each, order=order)
        found = []
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            with torch.no_grad():
                found.append(compiled(params(model)))
            optimizer.zero_grad()
        totals.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*totals, strict=True))


@functools.cache
def one_step_on_the_device() -> dict[str, torch.Tensor]:
    model, optimizer = make("device")
    loss_of(model, 0).backward()
    optimizer.step()
    return snapshot(model, optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("how", ["traced", "fake", "fx"])
def test_what_waits_while_others_look_at_operations(how: str, mix: str) -> None:
    """Our copies are in no trace, and are made for real where tensors are fake."""
    model, optimizer = make(mix, order=LATEST if mix != "device" else None)
    loss_of(model, 0).backward()
    optimizer.step()
    if how == "traced":
        traced = torch.jit.trace(model, (tokens(1),))
        assert torch.equal(traced(tokens(2)), model(tokens(2)))
    elif how == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert (model.head.weight * 2).shape == (10, 32)
            assert model(tokens(1)).shape == (4, 10)
    else:
        graph = make_fx(lambda x: model.head.weight @ x)(torch.ones(32))
        assert torch.equal(graph(torch.ones(32)), model.head.weight @ torch.ones(32))
    assert_equal(snapshot(model, optimizer), one_step_on_the_device())


def test_parametrised_weights() -> None:
    """Spectral norm reads the weight in forward of another module than its own, and keeps vectors of it."""
    ends = []
    for mix, order in (("device", Order(eager=True)), ("host", LATEST)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        torch.nn.utils.parametrizations.spectral_norm(model[0])
        torch.nn.utils.parametrizations.weight_norm(model[2])
        optimizer = adamw(model, **MIXES[mix], backend=SimulatedBackend(threads=1, order=order))
        found: Kept = {}
        for step in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            see(found, model[0].weight, model[2].weight, model(torch.full((2, 8), float(step))))
        ends.append(found["seen"])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_an_l2_term_before_forward() -> None:
    ends = []
    for mix, order in (("device", Order(eager=True)), ("host", LATEST), ("mixed", LATEST)):
        model, optimizer = make(mix, order=order)
        for step in range(3):
            with optimizer.accumulate(last=True):
                penalty = sum(p.square().sum() for p in model.parameters())
                (0.01 * penalty + loss_of(model, step)).backward()
            optimizer.step()
        ends.append(snapshot(model, optimizer))
    assert_equal(ends[1], ends[0])
    assert_equal(ends[2], ends[0])


def test_a_layer_that_reads_weights_of_another() -> None:
    """What was read outside is freed at the next such read, but not while it runs."""

    def train(mix: str, away: bool) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, order=LATEST if away else None)
        run = hostward.attach(model, optimizer, weights=2, layers=list(model.blocks)) if away else None
        for before, block in itertools.pairwise(model.blocks):

            def differ(_: Any, __: Any, out: torch.Tensor, a: Any = before.up, b: Any = block.up) -> torch.Tensor:
                return out + (a.weight - b.weight).square().sum()

            block.up.register_forward_hook(differ)
        for step in range(3):
            assert model.blocks[1].up.weight.detach().norm().item() > 0
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        if run is not None:
            run.detach()
        return snapshot(model, optimizer)

    assert_equal(train("host", True), train("device", False))


def test_all_offloaded_weights_are_here_where_asked_for() -> None:
    model, optimizer = make("host", order=LATEST, streamed_fraction=0.0)
    reference, other = make("device")
    for m, o in ((model, optimizer), (reference, other)):
        loss_of(m, 0).backward()
        o.step()
    attached = hostward.attach(model, optimizer, weights=2, layers=list(model.blocks))
    with attached.weights_here():
        report = attached.report().weights
        assert report is not None
        assert report.freed_bytes == 0
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    report = attached.report().weights
    assert report is not None
    assert report.freed_bytes > 0
    optimizer.wait_for_weights()
    report = attached.report().weights
    assert report is not None
    assert report.freed_bytes == 0
    attached.detach()
