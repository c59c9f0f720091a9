"""`hostward train` with the hidden step: every placement and schedule trains the same bits, and says what it cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import SMALL, different, offloaded, saved
from hypothesis import given, strategies as st
from run_fixtures import Cli

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.core.inventory import Dtype, Inventory, Parameter, cut_buckets
from hostward.core.placement import Plan, place_fraction
from hostward.runtime.simulated import backend
from hostward.runtime.step_trace import SpanKind, Trace, from_chrome
from hostward.schedule.ops import Lane
from hostward.trainer import loop, microbatches, setup
from hostward.trainer.offload_options import gradient_bytes
from hostward.trainer.plan_request import Shares, shares
from hostward.trainer.readback import Numbers, Readback
from hostward.trainer.report import measured
from hostward.trainer.run import Run

TINY = "qwen3_moe_tiny_pretrain_config"
STREAMED = ["optimizer.offload_optimizer_states=True"]
SERIAL = ["optimizer.overlap_cpu_optimizer_d2h_h2d=False"]
PLACEMENTS = {
    "serial host": [*offloaded(1), *SERIAL],
    "streamed": [*STREAMED, "optimizer.optimizer_state_offload_fraction=0.75"],
    "serial streamed": [*STREAMED, *SERIAL],
    "streamed through 1 MiB": [*STREAMED, "optimizer.optimizer_state_offload_chunk_size_mb=1"],
    "host and streamed": [*offloaded(0.5), *STREAMED],
    "mixed": [*offloaded(1), "optimizer.offload_mix=0.5"],
    "summed on the host": [*offloaded(1), "optimizer.gradients=host"],
    "half summed, mixed": [*offloaded(0.6), "optimizer.gradients=host", "optimizer.offload_mix=0.3"],
    "mixed by rates": [*offloaded(1), "optimizer.offload_mix=auto"],
    "stepped in backward": [*offloaded(1), "optimizer.step_early=0.6"],
    "mixed, stepped in backward": [*offloaded(0.8), "optimizer.offload_mix=0.3", "optimizer.step_early=1"],
    "unpinned": [*offloaded(1), "optimizer.pin_cpu_grads=False", "optimizer.pin_cpu_params=False"],
}


def test_t28_every_placement_and_schedule_trains_the_same_bits(train: Cli, tmp_path: Path) -> None:
    """bf16 and two microbatches. Clipping is on; every gradient norm is the same."""
    common = ["model.params_dtype=bf16", "model.experts_implementation=eager", "train.train_iters=4"]
    base = train(*common, f"checkpoint.save={tmp_path / 'base'}").report
    tensors, _ = saved(tmp_path / "base")
    for name, words in PLACEMENTS.items():
        folder = tmp_path / name.replace(" ", "-")
        other = train(*common, *words, f"checkpoint.save={folder}").report
        for key in ("losses", "grad_norms", "skipped_iterations"):
            assert other[key] == base[key], name
        assert different(saved(folder)[0], tensors) == [], name
        assert other["offloaded_bytes"] > 0


def test_t28_one_microbatch_of_fp16_trains_the_same_bits(train: Cli) -> None:
    """Gradients leave in the only backward, before the scaler has seen them."""
    common = ["model.params_dtype=fp16", "train.micro_batch_size=4", "model.experts_implementation=eager"]
    base = train(*common, "train.train_iters=4").report
    assert len(base["skipped_iterations"]) < 4
    for name in ("serial host", "mixed", "streamed"):
        other = train(*common, "train.train_iters=4", *PLACEMENTS[name]).report
        for key in ("losses", "grad_norms", "skipped_iterations"):
            assert other[key] == base[key], name


def test_buckets_are_counted_by_placement(train: Cli) -> None:
    outcome = train("train.train_iters=2", *PLACEMENTS["host and streamed"])
    report = outcome.report
    assert report["buckets"] == 7
    assert report["host_buckets"] + report["streamed_buckets"] == 7
    assert 0 < report["streamed_buckets"] < 7
    words = f"7 of 7 buckets: {report['host_buckets']} stepped on the host, {report['streamed_buckets']} streamed"
    assert words in report["placements"]
    assert f"{report['host_buckets']} stepped by the CPU, {report['streamed_buckets']} streamed" in outcome.out
    memory = report["memory"]["device_by_owner_bytes"]
    assert memory["staging slots"] > 0
    assert memory["norm partials"] > 0


@pytest.mark.parametrize(
    ("option", "owner"), [("pin_cpu_grads", "gradients"), ("pin_cpu_params", "weights for upload")]
)
def test_s5_pinning_is_counted(train: Cli, option: str, owner: str) -> None:
    pinned, not_pinned = (
        train("train.train_iters=1", *offloaded(1), f"optimizer.{option}={on}").report["memory"] for on in (True, False)
    )
    assert pinned["host_by_owner_bytes"] == not_pinned["host_by_owner_bytes"]
    assert pinned["pinned_bytes"] - not_pinned["pinned_bytes"] == pinned["host_by_owner_bytes"][owner]


def test_chunk_size_bounds_what_streamed_state_takes_of_the_device(train: Cli) -> None:
    """Buckets of 64 Ki elements of 10 bytes: two do not fit 1 MiB."""
    words = ["train.train_iters=1", "model.params_dtype=bf16", "model.experts_implementation=eager"]
    words += ["model.moe_ffn_hidden_size=128", *STREAMED]
    free, bound = (
        train(*words, f"optimizer.optimizer_state_offload_chunk_size_mb={mib}").report["memory"] for mib in (0, 1)
    )
    assert bound["device_by_owner_bytes"]["staging slots"] == 64 * 1024 * 10
    assert free["device_by_owner_bytes"]["staging slots"] == 2 * 64 * 1024 * 10


# -------------------------------------------------------------------- shares


def tiny(*words: str) -> Config:
    return apply_overrides(recipes.load(TINY), words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), Shares(0.0, 0.0)),
        (offloaded(0), Shares(0.0, 0.0)),
        (offloaded(0.3), Shares(0.3, 0.0)),
        (STREAMED, Shares(1.0, 1.0)),
        ((*STREAMED, "optimizer.optimizer_state_offload_fraction=0.3"), Shares(0.3, 1.0)),
        ((*STREAMED, "optimizer.optimizer_state_offload_fraction=0"), Shares(0.0, 0.0)),
        ((*offloaded(0.5), *STREAMED), Shares(1.0, 0.5)),
        ((*offloaded(0.5), *STREAMED, "optimizer.optimizer_state_offload_fraction=0.5"), Shares(0.75, 0.25 / 0.75)),
        ((*offloaded(1), *STREAMED), Shares(1.0, 0.0)),
        ((*offloaded(0.5), "optimizer.offload_mix=0.25"), Shares(0.5, 0.25)),
        ((*offloaded(0.5), "optimizer.offload_mix=auto"), Shares(0.5, "auto")),
    ],
)
def test_shares_of_the_options(words: tuple[str, ...], expected: Shares) -> None:
    assert shares(tiny(*words)) == expected


@given(st.floats(0, 1), st.floats(0, 1))
def test_host_and_streamed_shares_add_up(on_host: float, streamed: float) -> None:
    config = tiny(*offloaded(1), *STREAMED)
    config.optimizer.optimizer_offload_fraction = on_host
    config.optimizer.optimizer_state_offload_fraction = streamed
    found = shares(config)
    assert isinstance(found.streamed_fraction, float)
    assert 0 <= found.offload_fraction <= 1
    assert 0 <= found.streamed_fraction <= 1
    assert found.host_share[0] == pytest.approx(on_host, abs=1e-12)
    assert found.offload_fraction * found.streamed_fraction == pytest.approx((1 - on_host) * streamed, abs=1e-12)


def layers(count: int) -> tuple[Inventory, Plan]:
    """Layers of one matrix and one bucket each, 64 Ki elements; all on the host."""
    numel = 64 * 1024
    parameters = tuple(Parameter(f"layers.{i}.w", numel, Dtype.BF16, f"layers.{i}") for i in range(count))
    buckets = cut_buckets(parameters, cap=numel)
    return Inventory(parameters, buckets), place_fraction(buckets, 1.0)


@pytest.mark.parametrize(
    ("words", "of_ten"),
    [
        (("train.global_batch_size=1", "train.micro_batch_size=1"), 3),  # one is made while two are on their way out
        (("train.global_batch_size=1", "train.micro_batch_size=1", *SERIAL), 10),
        (("train.global_batch_size=4", "train.micro_batch_size=2"), 20),  # fp32
        (("train.global_batch_size=4", "train.micro_batch_size=2", "optimizer.gradients=host"), 3),
    ],
)
def test_gradients_on_the_device_at_most(words: tuple[str, ...], of_ten: int) -> None:
    config = tiny(*offloaded(1), *words)
    assert gradient_bytes(config, *layers(10)) == of_ten * 64 * 1024 * 2


def test_gradients_that_stay_beside_those_that_are_added_up_on_the_host_are_fp32() -> None:
    inventory, _ = layers(10)
    half = place_fraction(inventory.buckets, 0.5)
    config = tiny(*offloaded(0.5), "optimizer.gradients=host")
    assert gradient_bytes(config, inventory, half) == 5 * 64 * 1024 * 4 + 3 * 64 * 1024 * 2


def test_gradients_of_streamed_state_stay_for_the_step() -> None:
    inventory, _ = layers(10)
    config = tiny(*STREAMED, "train.global_batch_size=1", "train.micro_batch_size=1")
    assert gradient_bytes(config, inventory, place_fraction(inventory.buckets, 1.0, 1.0)) == 10 * 64 * 1024 * 2


# -------------------------------------------------------------------- numbers on their way


def scalars(number: int) -> tuple[torch.Tensor, ...]:
    return torch.tensor(0.1 * number), torch.tensor([1.0 / (number + 1)]), torch.tensor([number % 2], dtype=torch.int32)


def test_numbers_arrive_late_in_order_and_with_their_bits() -> None:
    readback = Readback(torch.device("cpu"), late=1)
    given_out: list[Numbers] = []
    for number in range(5):
        readback.send(number, *scalars(number))
        assert len(given_out) == max(0, number - 1)
        given_out += readback.arrived()
    assert [n.iteration for n in given_out] == [0, 1, 2, 3]
    given_out += readback.arrived(everything=True)
    assert readback.arrived(everything=True) == []
    for number, numbers in enumerate(given_out):
        loss, norm, skip = scalars(number)
        assert numbers == Numbers(number, loss.item(), norm.item(), bool(skip.item()))


def test_numbers_that_are_late_make_the_same_report(
    train: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a CUDA device: progress lags by one iteration, and everything is there at each save and at the end."""
    caplog.set_level(logging.INFO, "hostward")
    words = ["train.train_iters=5", "logger.log_interval=1", *offloaded(1)]
    words += [f"checkpoint.save={tmp_path}/run", "checkpoint.save_interval=2"]
    at_once = train(*words).report
    lines = [m for m in caplog.messages if m.startswith(("iteration", "saved"))]
    caplog.clear()
    monkeypatch.setattr("hostward.trainer.run.Readback", lambda device: Readback(device, late=1))
    behind: list[int] = []
    real = loop.collect

    def collect(run: Run, *arguments: Any, **options: Any) -> None:
        real(run, *arguments, **options)
        behind.append(run.iteration - len(run.losses))

    monkeypatch.setattr(loop, "collect", collect)
    words[words.index(f"checkpoint.save={tmp_path}/run")] = f"checkpoint.save={tmp_path}/late"
    late = train(*words).report
    assert behind == [1, 0, 1, 0, 1, 0]
    for key in ("losses", "grad_norms", "skipped_iterations"):
        assert late[key] == at_once[key]
    assert len(late["iteration_s"]) == 5
    shown = [m for m in caplog.messages if m.startswith(("iteration", "saved"))]
    # Not the memory of the process, nor the time.
    said = [[[p for p in s.split("  ") if p.startswith(("iteration", "loss"))] for s in log] for log in (shown, lines)]
    assert said[0] == said[1]
    assert [s.split()[0] for s in shown] == [s.split()[0] for s in lines]


def test_skipped_steps_keep_their_iteration(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the third iteration is infinite."""
    real, calls = microbatches.training_loss, []

    def spoilt(*arguments: Any) -> torch.Tensor:
        calls.append(None)
        return real(*arguments) * (float("inf") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(microbatches, "training_loss", spoilt)
    monkeypatch.setattr("hostward.trainer.run.Readback", lambda device: Readback(device, late=1))
    report = train("train.train_iters=4", *offloaded(1)).report
    assert report["skipped_iterations"] == [2]
    assert report["grad_norms"].index(None) == 2


def test_gradients_leave_in_the_last_backward(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in an earlier one; the serial schedule takes them at the step."""
    copies: list[list[str]] = []
    real_backward = loop.backward

    def backward(run: Run) -> torch.Tensor:
        with run.optimizer.trace() as trace:
            result = real_backward(run)
        copies.append([s.name for s in trace.spans if s.lane is Lane.D2H and s.kind is SpanKind.COPY])
        return result

    monkeypatch.setattr(loop, "backward", backward)
    monkeypatch.setattr(loop, "METERED_ITERATIONS", 0)
    train("train.train_iters=1", *offloaded(1))
    train("train.train_iters=1", *offloaded(1), *SERIAL)
    assert len(copies[0]) == 7
    assert all(name.startswith("offload/d2h/grad/") for name in copies[0])
    assert copies[1] == []


def test_steps_in_backward_are_made_at_the_scheduled_learning_rate(
    train: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: it was set after backward, and each such step was made again, in silence."""
    real_step, right = loop.step, []

    def step(run: Run, loss: torch.Tensor) -> None:
        run.optimizer.backend.synchronise()
        guesses = [state.guess for state in run.optimizer._states if state.guess is not None]
        before = [guess.data.clone() for guess in guesses]
        real_step(run, loss)
        run.optimizer.backend.synchronise()
        made_and_likely = [
            (int(guess[0]) & 0xFFFFFFFF, int(now.data[0]) >> 32) for guess, now in zip(before, guesses, strict=True)
        ]
        right.append(set(made_and_likely))

    monkeypatch.setattr(loop, "step", step)
    report = train("train.train_iters=4", "optimizer.clip_grad=0", *PLACEMENTS["stepped in backward"]).report
    assert len(set(report["learning_rates"])) == 4
    assert right == [{(0, 1)}, {(1, 1)}, {(1, 1)}, {(1, 1)}]
    assert "between backward and step()" not in caplog.text


# -------------------------------------------------------------------- what it cost


def test_trace_holds_the_last_iterations(train: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    outcome = train("train.train_iters=5", *PLACEMENTS["host and streamed"], "--trace", file)
    trace = from_chrome(file)
    assert len(trace.steps()) == 3
    names = {span.name.rpartition("/")[0] for span in trace.spans if span.kind is SpanKind.COPY}
    assert {"offload/d2h/grad", "offload/h2d/state", "offload/d2h/state"} <= names
    offload = outcome.report["offload"]
    assert (offload["first_iteration"], offload["last_iteration"]) == (2, 4)
    summary = trace.summary(trace.steps()[:-1])
    assert offload["host_step_s"] == pytest.approx(summary.host_step_s / 2, abs=1e-6)
    assert offload["transfer_bytes"] == {d: n / 2 for d, n in summary.transfer_bytes.items()}
    assert offload["hidden_s"] + offload["exposed_s"] >= offload["offload_s"] > 0
    assert outcome.report["moved_d2h_bytes"] == pytest.approx(5 * offload["transfer_bytes"]["d2h"])
    for line in ("measured in iterations 3 to 4", *offload["lines"]):
        assert line.split() in [outcome.out.split()[i : i + len(line.split())] for i in range(len(outcome.out.split()))]


def test_a_short_run_is_metered_whole(train: Cli, tmp_path: Path) -> None:
    outcome = train("train.train_iters=1", *offloaded(1), "--trace", tmp_path / "trace.json")
    assert len(from_chrome(tmp_path / "trace.json").steps()) == 1
    assert (outcome.report["offload"]["first_iteration"], outcome.report["offload"]["last_iteration"]) == (0, 1)


def test_without_trace_offloading_is_metered_and_nothing_else(train: Cli) -> None:
    assert train("train.train_iters=2", *offloaded(1)).report["offload"]["host_step_s"] > 0
    assert train("train.train_iters=2").report["offload"] is None


def test_a_trace_of_nothing_is_a_trace(train: Cli, tmp_path: Path) -> None:
    outcome = train("train.train_iters=2", "--trace", tmp_path / "trace.json")
    assert from_chrome(tmp_path / "trace.json").spans == ()
    assert outcome.report["offload"] is None
    assert measured(Trace(), 2, 2) is None


def test_metering_changes_no_bit(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    metered = train("train.train_iters=4", *PLACEMENTS["mixed"]).report
    monkeypatch.setattr(loop, "METERED_ITERATIONS", 0)
    plain = train("train.train_iters=4", *PLACEMENTS["mixed"]).report
    assert plain["offload"] is None
    assert plain["losses"] == metered["losses"]


def test_an_interrupt_while_metering_stops_the_meter(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a host step of the last iteration: it reaches the caller, and no operation is timed any more."""
    config = tiny(*SMALL, f"dataset.path={text}", *offloaded(1), "train.train_iters=3")
    run = setup.prepare(TINY, config)
    real: Callable[..., None] = backend.adamw_step
    calls: list[None] = []

    def interrupted(task: Any) -> None:
        calls.append(None)
        if len(calls) == 17:
            raise KeyboardInterrupt
        real(task)

    monkeypatch.setattr(backend, "adamw_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.train(run, metered=3)
    assert run.optimizer.backend.meter is None
    assert run.trace is None


@pytest.mark.parametrize(
    "words", [["--trace", "{folder}"], ["--trace", "{folder}/no/trace.json"], ["--trace", "/proc/self/t"]]
)
def test_a_trace_that_cannot_be_written_is_refused_before_training(
    refused: Cli, tmp_path: Path, words: list[str]
) -> None:
    outcome = refused(*(w.format(folder=tmp_path) for w in words))
    said = ["is a folder", "its folder does not exist", "cannot be written"]
    assert sum(f"--trace {words[1].format(folder=tmp_path)}" in outcome.err and s in outcome.err for s in said) == 1


def test_a_trace_replaces_plain_files_only(refused: Cli, tmp_path: Path) -> None:
    assert "--trace /dev/null is no plain file" in refused("--trace", "/dev/null").err
    same = refused("--trace", tmp_path / "out.json", "--json", tmp_path / "out.json")
    assert f"--json and --trace both name {tmp_path}/out.json" in same.err
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["optimizer.optimizer_state_offload_chunk_size_mb=1"],
            "has no effect while optimizer.offload_optimizer_states",
        ),
        (["optimizer.offload_mix=0.5"], "has no effect while optimizer.optimizer_cpu_offload=false"),
        ([*STREAMED, "optimizer.pin_cpu_grads=False"], "has no effect while optimizer.optimizer_cpu_offload=false"),
        ([*offloaded(1), *STREAMED, "optimizer.offload_mix=auto"], "both say how much is streamed"),
        (SERIAL, "has no effect while nothing is offloaded"),
        (["dataset.text_key=body"], "words.txt is read as text, which has no keys"),
        (["scheduler.lr_decay_style=constant"], "scheduler.lr_decay_style=constant does not decay"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(refused: Cli, words: list[str], said: str) -> None:
    assert said in refused(*words).err
