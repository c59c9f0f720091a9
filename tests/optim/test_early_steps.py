"""CPU steps that are guessed in backward: the bits are those without them, whether a guess was right, wrong or skipped.

Seen red: sets that are not exchanged, or exchanged where nothing was guessed; uploads of the old set; works of one
exchange used after another; a guess that outlives a change of the state, or gradients that are taken back; a step that
is cut short amid the exchange, with works of before or one buffer in both sets; second sets that are not counted or not
pinned; hyper-parameters that are not valid yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from networks import loss_of, make
from optimizer_cases import NEVER, Model, adamw, assert_equal, mlp, mlp_loss, set_gradients, snapshot
from test_state_formats import BF16, FP8, FP32, Form, dtypes_of

import hostward
from hostward.core.placement import Placement
from hostward.errors import ConfigError, MemoryLimitError, NativeError, OrderingError
from hostward.kernels.cpu.adamw import GUESS_WORDS
from hostward.optim import bucket_state, op_binding, step_executor
from hostward.runtime.backend import Tier
from hostward.runtime.simulated import backend as simulated
from hostward.runtime.simulated.backend import LATEST, Order, SimulatedBackend
from hostward.schedule.ops import Lane, Schedule
from hostward.schedule.optimizer import StepShape, lower

EAGER = Order(eager=True)
MAX_NORM = 30.0
KINDS = ("free", "free", "clips", "free", "free", "nan", "free", "free", "lr", "free", "some", "free", "free")
"""Steps that do not clip, clip, are skipped, get another lr after backward, or lack the gradient of one parameter."""
FACTORS = {"clips": 1.0}
GUESSED = (0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1)
"""Whether a guess of the step before was right, or would have been."""
HOST = {"streamed_fraction": 0.0}


def made_guesses(optimizer: hostward.AdamW) -> list[bool]:
    """Of each bucket with two sets, whether a guess for the step to come was made."""
    optimizer.backend.synchronise()
    return [bool(int(s.guess.data[0]) & 0xFFFFFFFF) for s in optimizer._states if s.guess is not None]


def take(model: torch.nn.Module, optimizer: hostward.AdamW, number: int, kind: str) -> None:
    """Gradients as backward makes them, the last parameter's first, after a forward that reads all weights."""
    optimizer.wait_for_weights()
    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.numel() or (kind == "some" and name == NEVER):
            continue
        generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + number)
        gradient = torch.randn(parameter.shape, generator=generator) * FACTORS.get(kind, 1e-3)
        if kind == "nan" and name == "layers.2.after":
            gradient[7] = torch.nan
        optimizer.take_gradient(name, gradient.to(parameter.dtype))


def step(
    model: torch.nn.Module,
    optimizer: hostward.AdamW,
    number: int,
    kind: str,
    between: Callable[[], object] | None = None,
) -> None:
    take(model, optimizer, number, kind)
    if kind == "lr":
        optimizer.param_groups[0]["lr"] *= 0.5
    if between is not None:
        between()
    optimizer.step()


def made(dtype: torch.dtype, form: Form, order: Order = EAGER, **options: Any) -> tuple[Model, hostward.AdamW]:
    model = Model(dtype)
    on = SimulatedBackend(order=order, threads=1)
    options = {"max_grad_norm": MAX_NORM, "state_dtypes": dtypes_of(form), "backend": on, **options}
    return model, adamw(model, **options)


def trained(
    dtype: torch.dtype, form: Form, kinds: Sequence[str] = KINDS, order: Order = EAGER, **options: Any
) -> dict[str, torch.Tensor]:
    model, optimizer = made(dtype, form, order, **options)
    norms = []
    for number, kind in enumerate(kinds):
        step(model, optimizer, number, kind)
        norms.append(optimizer.grad_norm)
    clipped = ["nan" if norm == float("inf") else "clips" if norm > MAX_NORM else "free" for norm in norms]
    assert clipped == [kind if kind in ("nan", "clips") else "free" for kind in kinds]
    return snapshot(model, optimizer)


FORMS: dict[torch.dtype, list[Form]] = {
    BF16: [(FP32, FP32), (BF16, BF16), (FP8, FP8), (FP8, BF16, BF16), (FP32, FP32, BF16)],
    torch.float16: [(FP32, FP32), (BF16, FP8)],
    FP32: [(FP32, FP32), (FP8, BF16)],
}


@pytest.mark.parametrize(("dtype", "form"), [(dtype, form) for dtype, forms in FORMS.items() for form in forms])
def test_bits_are_those_of_steps_after_the_norm(dtype: torch.dtype, form: Form) -> None:
    expected = trained(dtype, form)
    for fraction in (0.5, 1.0):
        for order in (EAGER, LATEST):
            early = {"offload_fraction": fraction, "step_early": True, **HOST}
            assert_equal(trained(dtype, form, order=order, **early), expected)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_buckets_are_guessed_in_groups(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver blocks the caller where many host functions each wait for an event. Those left over are not guessed.

    Seen red: a group that waits for nothing.
    """
    expected = trained(BF16, (FP32, FP32))
    monkeypatch.setattr(step_executor, "MOST_GUESSES_APART", groups)
    for order in (EAGER, LATEST, Order(late=frozenset({Lane.D2H})), Order(late=frozenset({Lane.HOST}))):
        early = {"offload_fraction": 1.0, "step_early": True, **HOST}
        assert_equal(trained(BF16, (FP32, FP32), order=order, **early), expected)
    model, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, **HOST)
    step(model, optimizer, 0, "free")
    take(model, optimizer, 1, "free")
    count, sent = len(optimizer._states), -(-len(optimizer._states) // groups)
    assert count > 3
    assert sum(made_guesses(optimizer)) == count // sent * sent


LATE = [frozenset({lane}) for lane in Lane] + [frozenset({Lane.HOST, Lane.H2D}), frozenset({Lane.D2H, Lane.HOST})]


@pytest.mark.parametrize("late", LATE, ids=lambda lanes: "+".join(sorted(lanes)))
def test_bits_with_each_lane_as_late_as_can_be(late: frozenset[Lane]) -> None:
    expected = trained(BF16, (FP32, FP32))
    for mix in ({"offload_fraction": 1.0, **HOST}, {"offload_fraction": 0.8, "streamed_fraction": 0.4}):
        for seed in (None, 5):
            found = trained(BF16, (FP32, FP32), order=Order(seed, late), step_early=True, **mix)
            assert_equal(found, expected)


def test_guesses_are_made_after_steps_that_did_not_clip() -> None:
    model, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, **HOST)
    missing = next(b for b, s in enumerate(optimizer._states) if NEVER in {r.name for r in s.bucket.ranges})
    for number, (kind, guessed) in enumerate(zip(KINDS, GUESSED, strict=True)):
        expected = [bool(guessed)] * len(optimizer._states)
        if kind == "some":  # the record is that of the step before
            expected[missing] = False
        turns = [s.turn for s in optimizer._states]
        step(model, optimizer, number, kind, lambda expected=expected: check(optimizer, expected))  # type: ignore[misc]
        turned = [s.turn is not turn for s, turn in zip(optimizer._states, turns, strict=True)]
        assert turned == [kind != "some" or b != missing for b in range(len(turns))]


def check(optimizer: hostward.AdamW, expected: list[bool]) -> None:
    assert made_guesses(optimizer) == expected


def test_a_learning_rate_that_changes_after_every_backward_is_told_and_guessed_with_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Seen red: every step was made twice, and nothing said so."""

    def run(order: Order = EAGER, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = made(BF16, (FP32, FP32), order, **options)
        for number, kind in enumerate(["free", *["lr"] * 4, *["free"] * 3]):
            if options.get("step_early"):
                guessed = number in (1, 6, 7)
                step(
                    model,
                    optimizer,
                    number,
                    kind,
                    lambda guessed=guessed: check(optimizer, [guessed] * len(optimizer._states)),
                )  # type: ignore[misc]
            else:
                step(model, optimizer, number, kind)
        return snapshot(model, optimizer)

    with caplog.at_level("WARNING", logger="hostward"):
        expected = run(offload_fraction=0.0)
        assert not caplog.records
        for order in (EAGER, LATEST):
            caplog.clear()
            assert_equal(run(order=order, offload_fraction=1.0, step_early=True, **HOST), expected)
            assert [r.getMessage() for r in caplog.records if "between backward and step()" in r.getMessage()] == [
                r.getMessage() for r in caplog.records
            ]
            assert len(caplog.records) == 1


def test_a_bucket_is_stepped_once_where_the_guess_was_right() -> None:
    """A right guess leaves the second set as it is: what is spoiled there is not put right."""
    model, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, **HOST)
    for number in range(2):
        step(model, optimizer, number, "free")
    state = optimizer._states[0]

    def spoil() -> None:
        optimizer.backend.synchronise()
        assert state.twin is not None
        state.twin.exp_avg.data[3] = 77.0

    step(model, optimizer, 2, "free", spoil)
    assert snapshot(model, optimizer)["exp_avg embed.weight"].view(-1)[3] == 77.0


def both(run: Callable[..., dict[str, torch.Tensor]]) -> None:
    """The same with and without early steps, in two orders."""
    expected = run(offload_fraction=0.0)
    for order in (EAGER, LATEST, Order(late=frozenset({Lane.HOST}))):
        assert_equal(run(order=order, offload_fraction=1.0, step_early=True, **HOST), expected)


def test_state_is_read_and_loaded_between_any_two_operations() -> None:
    def run(order: Order = EAGER, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = made(BF16, (FP32, FP32), order, **options)
        for number in range(3):
            step(model, optimizer, number, "free")
        before = snapshot(model, optimizer)
        take(model, optimizer, 3, "free")
        assert_equal(snapshot(model, optimizer), before)
        optimizer.step()
        other, resumed = made(BF16, (FP32, FP32), order, **options)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        for number in (4, 5):
            step(other, resumed, number, "free")
        found = snapshot(other, resumed)
        for number in (4, 5):
            step(model, optimizer, number, "free")
        assert_equal(snapshot(model, optimizer), found)
        return found

    both(run)


def test_what_changes_the_state_after_a_guess_is_stepped_with() -> None:
    def run(order: Order = EAGER, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = made(BF16, (FP32, FP32), order, **options)
        saved: dict[str, Any] = {}

        def set_moment() -> None:
            optimizer.set_state_of("layers.1.weight", {"exp_avg": torch.full((64, 130), 0.25), "step": 9})

        def write() -> None:
            optimizer.wait_for_weights()
            with torch.no_grad():
                model.get_parameter("head.weight").mul_(1.5)

        changes: dict[int, Callable[[], object]] = {
            2: set_moment,
            3: lambda: saved.update(optimizer.state_dict()),
            4: write,
            5: optimizer.reseed,
            6: lambda: optimizer.load_state_dict(saved),
        }
        for number in range(9):
            step(model, optimizer, number, "free", changes.get(number))
        return snapshot(model, optimizer)

    both(run)


@pytest.mark.parametrize("early", [{"lr": None}, {"betas": (0.9,)}, {"betas": (1.0, 0.95)}, {}], ids=str)
def test_hyper_parameters_need_be_valid_at_the_step_alone(early: dict[str, Any]) -> None:
    """Nothing is guessed with others, and backward does not raise. Seen red: a TypeError, a KeyError in backward."""

    def run(order: Order = EAGER, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = made(BF16, (FP32, FP32), order, **options)
        group = optimizer.param_groups[0]
        valid = dict(group)
        for number in range(6):
            if number in (0, 2, 3):
                group.update(early) if early else group.pop("lr")
            take(model, optimizer, number, "free")
            if number == 3:
                with pytest.raises(ConfigError, match=r"lr|betas"):
                    optimizer.step()
            if options.get("step_early"):
                assert made_guesses(optimizer) == [number > 3] * len(optimizer._states)
            group.update(valid)
            optimizer.step()
        return snapshot(model, optimizer)

    both(run)


def test_gradients_that_come_again_are_guessed_again() -> None:
    """Microbatches; rounds that are each called the last; gradients that are cleared before the step."""

    def run(order: Order = EAGER, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = mlp(torch.float32)
        on = SimulatedBackend(order=order, threads=1)
        optimizer = adamw(model, backend=on, max_grad_norm=1e3, **options)
        for number in range(6):
            for last in {0: (True,), 1: (True,), 2: (False, True), 3: (True, True)}.get(number, (True,)):
                with optimizer.accumulate(last=last):
                    mlp_loss(model, 10 * number + last).backward()
            if number == 4:
                optimizer.zero_grad()
                with optimizer.accumulate(last=True):
                    mlp_loss(model, 99).backward()
            if number == 5:  # all are taken back, and a bucket is not stepped after all
                mlp_loss(model, 98).backward()
                model[2].zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    both(run)


def test_a_gradient_that_comes_again_lands_after_the_guess_has_read_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        model = mlp(torch.float32)
        on = SimulatedBackend(order=Order(late=frozenset({Lane.HOST})), threads=1)
        optimizer = adamw(model, backend=on, offload_fraction=1.0, step_early=True, **HOST)
        for number in (0, 1):
            with optimizer.accumulate(last=True):
                mlp_loss(model, number).backward()

    run()

    def broken(shape: StepShape) -> Schedule:
        schedule = lower(shape)
        for b in shape.guessed:
            schedule = schedule.without_wait(f"download/{b}", f"~guess/{b}")
        return schedule

    monkeypatch.setattr(op_binding, "lower_step", broken)
    with pytest.raises(OrderingError, match="gradients"):
        run()


class Watched:
    """Reads some memory in the background until it is waited for: whether that was all the time what it was."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self.memory, self.before = memory, [m.clone() for m in memory]
        self.same: list[bool] = []

    def wait(self) -> None:
        self.same.append(all(map(torch.equal, self.memory, self.before)))


def test_a_guess_does_not_write_what_a_reader_in_the_background_reads() -> None:
    model, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, **HOST)
    for number in range(6):
        sources = optimizer.sources()
        weights = list(sources.weights.values())
        held = [*weights, *(source for roles in sources.state.values() for source in roles.values())]
        watched = Watched([memory for source in held for memory in source.memory])
        weights[0].readers.add(watched.wait)
        take(model, optimizer, number, "free")
        assert made_guesses(optimizer) == [number > 0] * len(optimizer._states)
        assert watched.same == []
        optimizer.step()
        assert watched.same == [True]


@pytest.mark.parametrize("where", ["start", "between microbatches", "before the step", "after the step"])
def test_sleep_changes_nothing(where: str) -> None:
    def run(nap: bool = True, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = make("host", BF16, None, grad_dtype=torch.float32, **options)

        def at(moment: str) -> None:
            if nap and moment == where:
                optimizer.sleep()
                optimizer.wake()

        for number in range(3):
            at("start")
            for last in (False, True):
                with optimizer.accumulate(last=last):
                    loss_of(model, 2 * number + last).backward()
                at("between microbatches" if not last else "before the step")
            optimizer.step()
            at("after the step")
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(run(step_early=True), run(nap=False))


def test_groups_that_are_added_keep_the_sets_as_they_are() -> None:
    def run(order: Order = EAGER, **options: Any) -> dict[str, torch.Tensor]:
        model = Model(BF16)
        parameters = dict(model.named_parameters())
        first = [(name, p) for name, p in parameters.items() if not name.startswith("head")]
        optimizer = adamw(first, backend=SimulatedBackend(order=order, threads=1), **options)
        for number in range(5):
            optimizer.wait_for_weights()
            for name, p in reversed(parameters.items()):
                if p.numel() and (number > 2 or name != "head.weight"):
                    optimizer.take_gradient(name, torch.full_like(p, 1e-3 * (number + 1)))
            optimizer.step()
            if number == 2:
                optimizer.add_param_group({"params": [("head.weight", parameters["head.weight"])]})
        return {f"{k} {n}": v for n, e in optimizer.state_dict()["state"].items() for k, v in e.items()}

    both(run)


@pytest.mark.parametrize("n", [1, 4, 6, -1, -14, -19])
def test_a_load_makes_an_interrupted_step_whole(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th confirmation fails; negative: an interrupt comes before an assignment of those that exchange sets."""
    model, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, max_grad_norm=None, **HOST)
    for number in range(3):
        step(model, optimizer, number, "free")
    weights, saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    take(model, optimizer, 3, "free")
    calls: list[Any] = []

    def fails(task: Any) -> None:
        calls.append(task)
        if len(calls) == n:
            raise NativeError("broken on purpose")
        hostward.kernels.cpu.adamw.adamw_step(task)  # type: ignore[attr-defined]

    def interrupted(*assigned: Any) -> None:
        calls.append(assigned)
        if len(calls) == -n:
            raise KeyboardInterrupt
        setattr(*assigned)

    with monkeypatch.context() as patch:
        if n < 0:
            patch.setattr(bucket_state, "setattr", interrupted, raising=False)
        else:
            patch.setattr(simulated, "adamw_step", fails)
        with pytest.raises(KeyboardInterrupt if n < 0 else NativeError):
            optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    other, expected = made(BF16, (FP32, FP32), max_grad_norm=None)
    other.load_state_dict(weights)
    expected.load_state_dict(saved)
    for number in range(3, 6):
        step(model, optimizer, number, "free")
        step(other, expected, number, "free")
    assert_equal(snapshot(model, optimizer), snapshot(other, expected))


@pytest.mark.parametrize("pin", [True, False])
def test_the_second_sets_are_counted_and_pinned_as_the_first(pin: bool) -> None:
    options: dict[str, Any] = {"offload_fraction": 1.0, "pin_weights": pin, **HOST}
    _, once = made(BF16, (FP32, FP32), **options)
    _, twice = made(BF16, (FP32, FP32), step_early=True, **options)
    buckets = [s.bucket for s in once._states]
    elements, ranges = sum(b.offsets[-1] for b in buckets), sum(len(b.ranges) for b in buckets)
    more = 12 * elements + 8 * ranges + 8 * GUESS_WORDS * len(buckets)
    held = [o.backend.ledger.total_bytes(Tier.HOST) for o in (once, twice)]
    assert held[1] - held[0] == more
    assert twice.backend.ledger.pinned_bytes - once.backend.ledger.pinned_bytes == 2 * elements * pin
    _, half = made(BF16, (BF16, BF16), step_early=True, **options)
    assert half.backend.ledger.total_bytes(Tier.HOST) == held[1] - 8 * elements


def test_no_room_for_the_second_sets_is_told_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    _, once = made(BF16, (FP32, FP32), offload_fraction=1.0, **HOST)
    asked: list[int] = []

    def require(nbytes: int, *, owner: str) -> None:
        asked.append(nbytes)
        raise MemoryLimitError(f"{owner}: no room")

    monkeypatch.setattr(bucket_state, "require_host_memory", require)
    on = SimulatedBackend(order=EAGER, threads=1)
    for early in (False, True):
        with pytest.raises(MemoryLimitError, match="optimizer state: no room"):
            made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=early, backend=on, **HOST)
    elements = sum(s.bucket.offsets[-1] for s in once._states)
    assert 12 * elements < asked[1] - asked[0] < 12 * elements + 4096
    assert on.ledger.total_bytes(Tier.HOST) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overlap": False}, "step_early with overlap=False"),
        ({"use_torch_optimizer": True}, "step_early with overlap=False or use_torch_optimizer=True"),
        ({"gradients": "host"}, 'step_early with gradients="host"'),
        ({"step_early": 1.5}, "step_early must be a number in"),
    ],
)
def test_options_that_leave_nothing_to_step_early_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        adamw(Model(), **{"step_early": True, "offload_fraction": 1.0, **options})
    assert ("step_early=0.5" if "step_early" in options else "leave step_early out") in caught.value.fix


def test_offloaded_weights_are_stepped_after_the_norm() -> None:
    def run(order: Order = EAGER, attach: bool = False, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = make("host", BF16, order, **options)
        run = None
        for number in range(6):
            if number == 2 and attach:
                run = hostward.attach(model, optimizer, weights=2)
            if number == 4 and run is not None:
                run.detach()
            with optimizer.accumulate(last=True):
                loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    expected = run()
    for order in (EAGER, LATEST):
        assert_equal(run(order, attach=True, step_early=True), expected)


def test_a_bucket_of_which_one_weight_is_offloaded_is_not_guessed() -> None:
    _, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, **HOST)
    names = [{r.name for r in s.bucket.ranges} for s in optimizer._states]
    fetched = next(iter(next(held for held in names if len(held) > 1)))
    optimizer._executor.offload_weights([fetched], None)
    guessed = {op.bucket for op in optimizer.schedule.ops if op.name.startswith("guess/")}
    assert guessed == {b for b, held in enumerate(names) if fetched not in held}


def test_gradients_that_come_at_the_step_are_not_guessed_with() -> None:
    """The caller would wait for the CPU there: the driver lets few host functions that wait for an event be pending."""
    model, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, step_early=True, **HOST)
    for number in range(3):
        step(model, optimizer, number, "free")
    turns = [s.turn for s in optimizer._states]
    for number in (3, 4, 5):
        set_gradients(model, number, factor=1e-3)
        optimizer.step()
    assert [s.turn for s in optimizer._states] == turns
    other, expected = made(BF16, (FP32, FP32))
    for number in range(6):
        if number < 3:
            step(other, expected, number, "free")
        else:
            set_gradients(other, number, factor=1e-3)
            expected.step()
    assert_equal(snapshot(model, optimizer), snapshot(other, expected))
    step(model, optimizer, 6, "free")
    assert [s.turn for s in optimizer._states] != turns


def test_a_share_of_the_buckets_is_stepped_early_and_the_rest_after_the_norm() -> None:
    early: dict[str, Any] = {"offload_fraction": 1.0, "step_early": 0.4, **HOST}
    _, optimizer = made(BF16, (FP32, FP32), **early)
    sizes = [s.bucket.state_bytes for s in optimizer._states]
    twins = [s.twin is not None for s in optimizer._states]
    assert twins == sorted(twins)
    early_bytes = sum(size for size, twin in zip(sizes, twins, strict=True) if twin)
    assert abs(early_bytes - 0.4 * sum(sizes)) <= max(sizes) / 2
    expected = trained(BF16, (FP32, FP32))
    for order in (EAGER, LATEST):
        assert_equal(trained(BF16, (FP32, FP32), order=order, **early), expected)


def test_nothing_is_guessed_by_default() -> None:
    _, optimizer = made(BF16, (FP32, FP32), offload_fraction=1.0, **HOST)
    assert all(s.twin is None for s in optimizer._states)
    assert "guess" not in optimizer.schedule.to_text()
    _, optimizer = made(BF16, (FP32, FP32), offload_fraction=0.5, step_early=True, **HOST)
    assert [s.twin is not None for s in optimizer._states] == [s.placement is Placement.HOST for s in optimizer._states]
