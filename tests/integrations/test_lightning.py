"""Lightning's Trainer and Fabric with hostward.AdamW: the bits of fraction 0, and nearly the numbers of torch's."""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import assert_equal, mlp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import hostward
from hostward.errors import AsleepError, ConfigError, HostwardError, ModelError, NotBuiltError
from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.runtime.backend import Lane
from hostward.runtime.simulated.backend import Order, SimulatedBackend

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import (  # noqa: E402
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402

from hostward.integrations.lightning import OffloadCallback, accumulate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and devices
LATE = Order(late=frozenset(lane for lane in Lane if lane is not Lane.COMPUTE))
PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "32-true": lambda: {"precision": "32-true"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"plugins": MixedPrecision("16-mixed", "cpu")},
}
BATCHES = 7
EXAMPLES = Path(__file__).parents[2] / "examples"


class Module(lightning.LightningModule):
    """Three Linears, a schedule, and a record of losses and of the steps in which gradients had left."""

    def __init__(self, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer], *, norm: bool = False) -> None:
        super().__init__()
        self.net = mlp()
        if norm:
            self.net.insert(1, torch.nn.BatchNorm1d(200))
        self.make = optimizer
        self.losses: list[float] = []
        self.left: list[bool] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.to(next(self.parameters()).dtype)
        return (self.net(x).float() - batch).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.losses.append(self.loss(batch).item())

    def on_after_backward(self) -> None:
        self.left.append(isinstance(next(self.parameters()).grad, OffloadedGrad))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def ours(fraction: float, **options: Any) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    order = LATE if fraction else Order(eager=True)
    options = {"lr": 1e-2, "weight_decay": 0.1, "offload_fraction": fraction, **options}
    return lambda model: hostward.AdamW(model, backend=SimulatedBackend(order=order, threads=1), **options)


def theirs(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def rows() -> Any:
    data = torch.randn(4 * BATCHES, 32, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def trainer_of(callbacks: list[Any], **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "max_epochs": 2, "accumulate_grad_batches": 3, **options}
    return lightning.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **quiet, **options)


def fit(
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    *,
    others: list[Any] | None = None,
    norm: bool = False,
    validate: bool = False,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Module:
    module = Module(optimizer, norm=norm)
    mine = [] if optimizer is theirs else [OffloadCallback()]
    trainer = trainer_of([*mine, *(others or [])], **options)
    trainer.fit(module, rows(), rows() if validate else None, ckpt_path=ckpt_path)
    return module


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_line_with_accumulation_and_clipping(precision: str) -> None:
    """Seven batches in windows of three: gradients leave in backward of the third, the sixth and the last one."""
    found = {}
    for fraction in (0.0, 0.5, 1.0):
        module = fit(ours(fraction), gradient_clip_val=0.05, **PRECISIONS[precision]())
        assert module.left == [False, False, True, False, False, True, True] * 2
        assert (module.trainer.gradient_clip_val, module.trainer.optimizers[0].max_grad_norm) == (0.05, 0.0)
        found[fraction] = weights(module) | {"losses": torch.tensor(module.losses)}
    assert_equal(found[0.0], found[0.5])
    assert_equal(found[0.0], found[1.0])
    plain = fit(theirs, gradient_clip_val=0.05, **PRECISIONS[precision]())
    tolerance = {"32-true": 1e-5, "bf16-true": 2e-2}.get(precision, 1e-3)  # torch has no fp32 main weights of bf16
    torch.testing.assert_close(module.losses, plain.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(weights(module), weights(plain), rtol=tolerance, atol=tolerance)


AVERAGES: dict[str, Callable[[], Any]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "mean": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "swa with batch norm": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights(kind: str) -> None:
    """Under late orders a weight that is read too early is one step old."""
    norm = "norm" in kind
    found = []
    for optimizer in (ours(0.0), ours(1.0), theirs):
        callback = AVERAGES[kind]()
        options: dict[str, Any] = {"norm": norm, "validate": "swa" not in kind, "max_epochs": 3}
        module = fit(optimizer, others=[callback], **options)
        found.append(weights(module) | {"losses": torch.tensor(module.losses)})
        if norm and optimizer is not theirs:
            averaged = dict(callback._average_model.named_parameters())
            assert_equal(dict(module.named_parameters()), averaged)
    assert_equal(found[0], found[1])
    if not norm:  # there torch's AdamW makes one step more, after averaging
        torch.testing.assert_close(found[1], found[2], rtol=1e-4, atol=1e-4)


def test_resume_at_another_fraction(tmp_path: Path) -> None:
    """From the middle of an epoch, with averages in the checkpoint."""
    whole = fit(ours(1.0), others=[EMAWeightAveraging(decay=0.9), saving(tmp_path)], enable_checkpointing=True)
    saved = tmp_path / "step=3.ckpt"
    module = fit(ours(0.5), others=[EMAWeightAveraging(decay=0.9)], ckpt_path=saved)
    assert module.trainer.optimizers[0].plan.placed_fraction < 0.9
    assert_equal(weights(whole), weights(module))
    state, other = (m.trainer.optimizers[0].state_dict()["state"] for m in (whole, module))
    for name, entry in state.items():
        assert_equal(entry, other[name])


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)


class Skips(Module):
    """Some batches have no loss, and the second epoch ends before its fifth batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx in (2, 3) else super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 1 and batch_idx == 4 else None


class Adversaries(Module):
    """Two optimizers and manual optimization; one of the two overlaps."""

    def __init__(self, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__(optimizer)
        self.critic = torch.nn.Linear(32, 1)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        with first.accumulate(last=True):
            loss = self.loss(batch) + self.critic(self.net(batch)).mean()
            self.manual_backward(loss)
        first.step()
        second.zero_grad()
        self.manual_backward(self.critic(batch).square().mean() - self.critic(self.net(batch).detach()).mean())
        second.step()
        first.zero_grad()
        second.zero_grad()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [self.make(self.net), self.make(self.critic)]


class Sharded(Module):
    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Skips, {}),
        (Adversaries, {"accumulate_grad_batches": 1}),
        (Module, {"accumulate_grad_batches": 1, "schedule": True, "limit_train_batches": 5}),
        (Module, {"strategy": "ddp"}),
        (Sharded, {"strategy": "fsdp2", "gradient_clip_val": 0.05}),
    ],
    ids=["batches without a loss", "manual optimization", "accumulation schedule", "ddp", "fsdp2"],
)
def test_other_loops(kind: type[Module], options: dict[str, Any], process_groups_end: None) -> None:
    found = []
    for fraction in (0.0, 1.0):
        module, callbacks = kind(ours(fraction)), [OffloadCallback()]
        others = {**options}
        if others.pop("schedule", False):
            callbacks.append(GradientAccumulationScheduler({0: 2, 1: 3}))
        if others.get("strategy") == "fsdp2":
            others["strategy"] = ModelParallelStrategy()
        trainer_of(callbacks, **others).fit(module, rows())
        found.append(weights(module) | {"losses": torch.tensor(module.losses)})
        if kind is Sharded:
            assert "".join("nY"[left] for left in module.left) == "nnYnnYY" * 2
        if "schedule" in options:
            assert "".join("nY"[left] for left in module.left) == "nYnYY" + "nnYnY"
    assert_equal(found[0], found[1])
    assert all(torch.isfinite(value).all() for value in found[0].values())


@pytest.fixture
def process_groups_end() -> Iterator[None]:
    """Lightning leaves the process group, and variables by which others would make one again."""
    variables = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(variables)


# ---------------------------------------------------------------- attached offloading, errors, refusals


class Layered(Module):
    def __init__(self, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__(optimizer)
        self.net = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4))
        self.fails = False

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch
        for number, block in enumerate(self.net):
            x = block(x)
            if number == 1 and self.fails and self.trainer.global_step == 1:
                x.register_hook(_fail)
        return (x - batch).square().mean()


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError("in backward")


def test_offloading_is_attached_while_training_runs() -> None:
    found = []
    for callback in (
        OffloadCallback(),
        OffloadCallback(activations=hostward.Activations(min_bytes=1, num_layers=3), weights=2),
    ):
        module = Layered(ours(1.0, streamed_fraction=0.0))
        reports: list[str] = []
        watch = lightning.pytorch.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, c=callback, r=reports: r.append(
                c.attachment and c.attachment.report().explain()
            )
        )
        trainer_of([callback, watch]).fit(module, rows())
        found.append(weights(module) | {"losses": torch.tensor(module.losses)})
        assert callback.attachment is None
        hostward.attach(module, activations=2).detach()  # nothing of the callback is left
    assert_equal(found[0], found[1])
    assert "weights: 8,448 bytes on the host" in reports[-1]
    assert "activations" in reports[-1]


class StoppedError(Exception):
    pass


class Sleeps(lightning.pytorch.callbacks.Callback):
    """Puts weights to sleep after a step, and then the program fails if there is an `error`."""

    def __init__(self, step: int, error: type[Exception] | None = None) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.optimizers[0].sleep()
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("asked", [{}, {"weights": 2}])
def test_a_fit_that_ends_while_weights_sleep_wakes_them(asked: dict[str, Any]) -> None:
    """Lightning moves the model when a fit ends or fails. Seen red: AsleepError of that move or of detaching, also in
    place of the program's own error.
    """
    module, callback = Layered(ours(1.0, streamed_fraction=0.0)), OffloadCallback(**asked)
    module.fails = False

    def fit_once(sleeps: Sleeps) -> Any:
        trainer = trainer_of([callback, sleeps], accumulate_grad_batches=1, max_epochs=1)
        trainer.fit(module, rows())
        return trainer

    with pytest.raises(StoppedError):
        fit_once(Sleeps(1, StoppedError))
    with pytest.raises(AsleepError, match="accumulate"):
        fit_once(Sleeps(1))
    trainer = fit_once(Sleeps(BATCHES))
    assert trainer.optimizers[0].asleep == ("state",)
    assert callback.attachment is None
    hostward.attach(module, activations=2).detach()  # nothing of the callback is left
    assert all(torch.isfinite(value).all() for value in weights(module).values())


def test_an_error_in_backward_leaves_everything_as_it_was() -> None:
    module, callback = Layered(ours(1.0)), OffloadCallback(activations=2)
    module.fails = True
    trainer = trainer_of([callback], gradient_clip_val=0.05, accumulate_grad_batches=1)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, rows())
    (optimizer,) = trainer.optimizers
    assert (trainer.gradient_clip_val, optimizer.max_grad_norm, callback.attachment) == (0.05, 0.0, None)
    with pytest.raises(ModelError, match="is incomplete"):
        optimizer.step()
    module.fails = False
    optimizer.zero_grad()
    with optimizer.accumulate(last=True):
        module.loss(torch.ones(2, 32)).backward()
    optimizer.step()


class StopsBeforeStep(Layered):
    stops = True

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.stops and self.trainer.global_step == 1:
            raise StoppedError


def test_an_error_between_backward_and_step_is_raised_and_leaves_everything_as_it_was() -> None:
    """Seen red: ModelError of the detaching in its place, `gradient_clip_val` not put back."""
    found = []
    for weights_of_layers in (None, 2):
        module, callback = StopsBeforeStep(ours(1.0, streamed_fraction=0.0)), OffloadCallback(weights=weights_of_layers)
        trainer = trainer_of([callback], gradient_clip_val=0.05, accumulate_grad_batches=1)
        with pytest.raises(StoppedError):
            trainer.fit(module, rows())
        (optimizer,) = trainer.optimizers
        assert (trainer.gradient_clip_val, optimizer.max_grad_norm, callback.attachment) == (0.05, 0.0, None)
        module.stops = False
        trainer_of([callback], gradient_clip_val=0.05, accumulate_grad_batches=1).fit(module, rows())
        found.append(weights(module))
    assert_equal(*found)


class StopsInWindow(lightning.pytorch.callbacks.Callback):
    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        trainer.should_stop = given[-1] == 2  # the first batch of the second window


def test_a_fit_that_stops_within_a_window_detaches() -> None:
    """Seen red: gradients that are accumulated on the host, with which layers could not be detached."""
    found = []
    for asked in ({}, {"weights": 2}):
        module = Layered(ours(1.0, streamed_fraction=0.0, gradients="host"))
        module.fails = False
        callback = OffloadCallback(**asked)
        trainer_of([callback, StopsInWindow()], accumulate_grad_batches=2).fit(module, rows())
        assert callback.attachment is None
        found.append(weights(module))
    assert_equal(*found)


class ClipsByHand(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "text", "module", "callback", "options"),
    [
        (ConfigError, "clip_algorithm", lambda: Module(ours(1.0)), {}, {"gradient_clip_algorithm": "value"}),
        (ConfigError, "ClipsByHand.configure", lambda: ClipsByHand(ours(1.0)), {}, {}),
        (ConfigError, "both limit the norm", lambda: Module(ours(1.0, max_grad_norm=1.0)), {}, {}),
        (ModelError, r"returned \['AdamW'\]", lambda: Module(theirs), {}, {}),
        (
            ConfigError,
            "2 optimizers of",
            lambda: Adversaries(ours(1.0)),
            {"activations": 2},
            {"gradient_clip_val": None},
        ),
    ],
    ids=["by value", "by hand", "two limits", "no optimizer", "two optimizers"],
)
def test_refused_before_the_first_batch(
    error: type[HostwardError],
    text: str,
    module: Callable[[], Module],
    callback: dict[str, Any],
    options: dict[str, Any],
) -> None:
    made = module()
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 1, **options}
    with pytest.raises(error, match=text):
        trainer_of([OffloadCallback(**callback)], **options).fit(made, rows())
    assert made.losses == []


def test_a_strategy_that_shards_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(ours(1.0))
    trainer = trainer_of([OffloadCallback()])
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [module.make(module)]
    monkeypatch.setattr(type(trainer), "strategy", FSDPStrategy(), raising=False)
    monkeypatch.setattr(FSDPStrategy, "optimizers", [module.make(module)])
    with pytest.raises(NotBuiltError, match="with FSDPStrategy"):
        trainer.callbacks[0].on_fit_start(trainer, module)


# ---------------------------------------------------------------- Fabric


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_loop_of_fabric(precision: str) -> None:
    found = {}
    for fraction in (0.0, 1.0, None):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = fabric.setup_module(mlp())
        plain = fraction is None
        make = theirs if plain else ours(fraction, max_grad_norm=0.05)
        optimizer = fabric.setup_optimizers(make(model.module))
        losses = []
        for number, batch in enumerate(rows()):
            last = number % 3 == 2
            loss = (model(batch).float() - batch).square().mean() / 3
            with contextlib.nullcontext() if plain else accumulate(fabric, model, optimizer, last=last):
                fabric.backward(loss)
            losses.append(loss.item())
            if last:
                if plain:
                    fabric.clip_gradients(model, optimizer, max_norm=0.05)
                elif fraction:
                    with pytest.raises(ModelError, match=r"not in \.grad any more"):
                        fabric.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()
        found[fraction] = weights(model) | {"losses": torch.tensor(losses)}
    assert_equal(found[0.0], found[1.0])
    torch.testing.assert_close(found[1.0], found[None], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("example", ["lightning_module", "fabric_loop"])
def test_examples(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert ended["losses"][-1] < ended["losses"][0] / 2
