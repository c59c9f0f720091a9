"""A loop of accelerate trains as with torch's own AdamW, and to the same bits at every fraction.

Seen red: backward left as it was; every microbatch taken for the last; no limit set for the step; a skipped step not
told; a flag of the scaler that is written after the step; torch's state taken for hostward's; sums of a window that
goes on not clipped; an optimizer kept by the accelerator after `free_memory`; a norm without a format; gradients
changed between clipping and the step, and clipped with it.
"""

from __future__ import annotations

import copy
import gc
import pickle
import runpy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import assert_equal, backend, mlp, mlp_loss

import hostward
from hostward.errors import ConfigError, HostwardError, ModelError, UnknownNameError
from hostward.runtime.backend import Lane

accelerate = pytest.importorskip("accelerate")

from hostward.integrations.accelerate import StepNorm, offload  # noqa: E402
from hostward.integrations.deepspeed import from_deepspeed  # noqa: E402

LATE = set(Lane) - {Lane.COMPUTE}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def forget_accelerators() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def accelerator_of() -> Iterator[Callable[..., Any]]:
    def make(**options: Any) -> Any:
        forget_accelerators()
        return accelerate.Accelerator(cpu=True, **options)

    yield make
    forget_accelerators()


class Loop:
    """Five batches in windows of two, so that the last window of an epoch is short; `where`: options of `offload`."""

    def __init__(self, accelerator: Any, **where: Any) -> None:
        self.accelerator, self.plain = accelerator, mlp()
        decays = [p for p in self.plain.parameters() if p.ndim > 1]
        others = [p for p in self.plain.parameters() if p.ndim == 1]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}, {"params": []}]
        optimizer: Any = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        if where:
            optimizer = offload(accelerator, optimizer, self.plain, backend=backend(late=LATE), **where)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = torch.utils.data.DataLoader(torch.arange(5), batch_size=1)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            self.plain, optimizer, loader, scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def epoch(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = mlp_loss(self.model, int(batch))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    if isinstance(norm, StepNorm):
                        with pytest.raises(ModelError, match=r"read before optimizer\.step"):
                            norm.item()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if self.accelerator.sync_gradients:
                self.norms.append(norm.item())

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.plain.named_parameters()}


def assert_trained_alike(theirs: Loop, *ours: Loop) -> None:
    """Ours as torch's, and to the same bits among themselves."""
    for loop in ours:
        torch.testing.assert_close(loop.norms, theirs.norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(loop.weights(), theirs.weights())
        assert loop.norms == ours[0].norms
        assert_equal(loop.weights(), ours[0].weights())


def test_a_loop_trains_as_with_torch_and_to_the_same_bits(accelerator_of: Callable[..., Any], tmp_path: Path) -> None:
    loops = []
    for fraction in (None, 0.0, 0.5, 1.0):
        where = {} if fraction is None else {"offload_fraction": fraction}
        loop = Loop(accelerator_of(gradient_accumulation_steps=2), **where)
        loop.epoch()
        loop.accelerator.save_state(str(tmp_path / str(fraction)))
        loop.epoch()
        loops.append(loop)
    theirs, *ours = loops
    assert [len(loop.norms) for loop in loops] == [6] * 4
    assert isinstance(ours[2].optimizer.optimizer, hostward.AdamW)
    assert ours[2].optimizer.optimizer.plan.placed_fraction == 1
    assert_trained_alike(*loops)
    for loop in ours:
        torch.testing.assert_close(loop.losses, theirs.losses, rtol=1e-5, atol=0)
        assert loop.scheduler.get_last_lr() == theirs.scheduler.get_last_lr() == [1e-2 / 7] * 3
        assert loop.losses == ours[0].losses

    again = Loop(accelerator_of(gradient_accumulation_steps=2), offload_fraction=0.5)
    again.accelerator.load_state(str(tmp_path / "1.0"))
    again.epoch()
    assert_equal(again.weights(), ours[0].weights())
    of_torch = Loop(accelerator_of(gradient_accumulation_steps=2), offload_fraction=1.0)
    of_torch.accelerator.load_state(str(tmp_path / "None"))
    of_torch.epoch()
    torch.testing.assert_close(of_torch.weights(), theirs.weights())


def test_the_example_runs(accelerator_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    accelerator_of()
    forget_accelerators()
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "accelerate_loop.py"))
    assert "placed 1.0000" in capsys.readouterr().out


def test_gradients_leave_in_the_last_backward_of_a_window(accelerator_of: Callable[..., Any]) -> None:
    loop = Loop(accelerator_of(gradient_accumulation_steps=2), offload_fraction=1.0)
    kinds = []
    for step in range(2):
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(mlp_loss(loop.model, step))
            kinds.append({type(p.grad).__name__ for p in loop.plain.parameters()})
    assert kinds == [{"Tensor"}, {"OffloadedGrad"}]


def test_clipping_after_each_microbatch_clips_as_accelerate_does(accelerator_of: Callable[..., Any]) -> None:
    """Without `if accelerator.sync_gradients`: the incomplete sum is clipped, and then the complete one."""
    found = []
    for where in ({}, {"offload_fraction": 0.0}, {"offload_fraction": 1.0}):
        loop = Loop(accelerator_of(gradient_accumulation_steps=2), **where)
        for batch in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(mlp_loss(loop.model, int(batch)) * 100)
                norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            loop.norms.append(norm.item())
        found.append(loop)
    assert_trained_alike(*found)
    loop = Loop(accelerator_of(gradient_accumulation_steps=2), offload_fraction=1.0, gradients="host")
    with loop.accelerator.accumulate(loop.model):
        loop.accelerator.backward(mlp_loss(loop.model, 0))
        with pytest.raises(ConfigError, match=r"after each microbatch(.|\n)*if accelerator\.sync_gradients"):
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_gradients_that_are_changed_after_clipping_are_refused(
    fraction: float, accelerator_of: Callable[..., Any]
) -> None:
    """With overlap=False they are in `.grad`, and the step would clip what was changed, unlike accelerate."""
    loop = Loop(accelerator_of(), offload_fraction=fraction, overlap=False)
    weight = next(loop.plain.parameters())

    def double() -> None:
        weight.grad *= 2

    def replace() -> None:
        weight.grad = torch.ones_like(weight)

    for change in (double, replace):
        loop.accelerator.backward(mlp_loss(loop.model, 0))
        loop.accelerator.clip_grad_norm_(loop.plain.parameters(), 0.1)
        change()
        before = loop.weights()
        for _ in range(2):
            with pytest.raises(ModelError, match=r"'[^']*weight' was changed between clip_grad_norm_ and step\(\)"):
                loop.optimizer.step()
        assert_equal(loop.weights(), before)
        loop.optimizer.zero_grad()

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = mlp_loss(loop.model, 1)
        loop.accelerator.backward(loss)
        double()
        loop.accelerator.clip_grad_norm_(loop.plain.parameters(), 0.1)
        return loss

    for _ in range(2):
        loop.optimizer.step(closure)
    loop.accelerator.backward(mlp_loss(loop.model, 2))
    loop.accelerator.clip_grad_norm_(loop.plain.parameters(), float("inf"))
    double()  # nothing is clipped
    loop.optimizer.step()


def test_clipping_again_keeps_the_smaller_limit(accelerator_of: Callable[..., Any]) -> None:
    """As a loop does that reads the norm after clipping, or the one before it by a limit that clips nothing.

    Seen red: the last limit, and no value for the first norm.
    """
    found = []
    for where in ({}, {"offload_fraction": 0.0}, {"offload_fraction": 1.0}):
        loop = Loop(accelerator_of(), **where)
        for step, limits in enumerate(((0.1, float("inf")), (float("inf"), 0.1), (0.05, 0.1), (0.1, 0.05))):
            loop.accelerator.backward(mlp_loss(loop.model, step))
            norms = [loop.accelerator.clip_grad_norm_(loop.plain.parameters(), limit) for limit in limits]
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.norms += [norm.item() for norm in norms]
        found.append(loop)
    assert_trained_alike(*found)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_backward_between_clipping_and_the_step_is_refused(
    fraction: float, accelerator_of: Callable[..., Any]
) -> None:
    """Of a loop that accumulates by hand and clips each time. Seen red: the sum alone clipped, or at the next try."""
    loop = Loop(accelerator_of(), offload_fraction=fraction)
    parameters = list(loop.plain.parameters())
    for step in range(2):
        for clear in (loop.plain.zero_grad, loop.optimizer.zero_grad):
            loop.accelerator.backward(mlp_loss(loop.model, step))
            loop.accelerator.clip_grad_norm_(parameters, 0.1)
            for _ in range(2):
                with pytest.raises(ModelError, match=r"a backward after clip_grad_norm_(.|\n)*accumulate\(model\)"):
                    loop.accelerator.backward(mlp_loss(loop.model, 1))
            clear()
            loop.accelerator.backward(mlp_loss(loop.model, step))
            loop.accelerator.clip_grad_norm_(parameters, 0.1)
            clear()
    loop.accelerator.backward(mlp_loss(loop.model, 0))
    loop.accelerator.clip_grad_norm_(parameters, float("inf"))  # clips nothing
    loop.accelerator.backward(mlp_loss(loop.model, 1))
    loop.optimizer.step()


@pytest.mark.parametrize("clearing", ["optimizer", "plain"])
def test_a_limit_goes_with_the_gradients_it_was_set_for(clearing: str, accelerator_of: Callable[..., Any]) -> None:
    """Gradients are cleared after clipping, without a step; a step that is refused is made again.

    Seen red: gradients of a later step that were clipped, where the model cleared them too, and those of the step that
    was refused, which were not.
    """
    found = []
    for where in ({}, {"offload_fraction": 0.0}, {"offload_fraction": 1.0}):
        loop = Loop(accelerator_of(), **where)
        loop.accelerator.backward(mlp_loss(loop.model, 0))
        loop.accelerator.clip_grad_norm_(loop.plain.parameters(), 1e-3)
        getattr(loop, clearing).zero_grad()
        for step, limited in enumerate((False, True, False)):
            loop.accelerator.backward(mlp_loss(loop.model, step))
            if limited:
                norm = loop.accelerator.clip_grad_norm_(loop.plain.parameters(), 1e-3)
                if where:
                    loop.optimizer.optimizer.sleep()
                    with pytest.raises(ModelError, match="asleep"):
                        loop.optimizer.step()
                    loop.optimizer.optimizer.wake()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.norms.append(norm.item())
        found.append(loop)
    assert_trained_alike(*found)


def test_the_norm_is_printed_copied_and_saved_as_a_number(accelerator_of: Callable[..., Any]) -> None:
    loop = Loop(accelerator_of(), offload_fraction=1.0)
    loop.accelerator.backward(mlp_loss(loop.model, 0))
    norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)
    assert f"{norm}" == "StepNorm(not yet)"
    for use in (lambda: f"{norm:.2f}", lambda: copy.deepcopy(norm), lambda: pickle.dumps(norm)):
        with pytest.raises(ModelError, match=r"read before optimizer\.step"):
            use()
    loop.optimizer.step()
    assert (f"{norm:.3f}", f"{norm}") == (f"{norm.item():.3f}", f"{norm.item()}")
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(copied) is torch.Tensor
        assert copied.item() == norm.item()


def test_memory_is_returned_when_the_accelerator_frees_it(accelerator_of: Callable[..., Any]) -> None:
    accelerator = accelerator_of()
    loop = Loop(accelerator, offload_fraction=1.0)
    loop.epoch()
    made, model = weakref.ref(loop.optimizer.optimizer), weakref.ref(loop.plain)
    accelerator.free_memory()
    loop.epoch()  # what the program still holds goes on
    del loop
    accelerator.free_memory()
    gc.collect()
    assert (made(), model()) == (None, None)
    with pytest.raises(ModelError, match="no offloaded optimizer"):
        accelerator.backward(torch.ones(()))
    Loop(accelerator, offload_fraction=1.0).epoch()


def test_groups_that_are_added_later_have_the_defaults_of_the_given_optimizer(
    accelerator_of: Callable[..., Any],
) -> None:
    """Seen red: those of hostward.AdamW."""
    names, found = ("lr", "betas", "eps", "weight_decay"), []
    for where in ({}, {"offload_fraction": 1.0}):
        accelerator, model = accelerator_of(), mlp()
        first, *others = model.parameters()
        optimizer: Any = torch.optim.AdamW([first], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
        if where:
            optimizer = offload(accelerator, optimizer, model, **where)
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer.add_param_group({"params": others})
        found.append([[group[name] for name in names] for group in (*optimizer.param_groups, optimizer.defaults)])
    assert found[0] == found[1] == [[1e-2, (0.8, 0.9), 1e-6, 0.2]] * 3


def test_a_second_offload_lets_the_first_optimizer_go(accelerator_of: Callable[..., Any]) -> None:
    """Seen red: the step that accelerate keeps beside a scaler, which is a method of the optimizer; gone for a second
    one that was refused.
    """
    accelerator = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    first = Loop(accelerator, offload_fraction=1.0)
    with pytest.raises(HostwardError, match=r"none\.json"):
        Loop(accelerator, plan="none.json")
    first.epoch()
    made = weakref.ref(first.optimizer.optimizer)
    second = Loop(accelerator, offload_fraction=1.0)
    second.epoch()
    gc.collect()
    assert made() is None
    with pytest.raises(ModelError, match=r"offload\(\) was called again(.|\n)*follows one optimizer"):
        first.optimizer.step()


def test_a_scaler_skips_step_and_schedule_as_with_torch(accelerator_of: Callable[..., Any]) -> None:
    """The first step overflows, where a scaler begins with a scale that is too large."""
    found = []
    for where in ({}, {"offload_fraction": 1.0}):
        accelerator = accelerator_of()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        loop = Loop(accelerator, **where)
        skipped, rates = [], []
        for step, factor in enumerate((float("inf"), 1.0, 1.0)):
            accelerator.backward(mlp_loss(loop.model, step) * factor)
            norm = accelerator.clip_grad_norm_(loop.plain.parameters(), 0.1)
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
            rates.append(loop.scheduler.get_last_lr()[0])
            loop.norms.append(norm.item())
        found.append((skipped, rates, accelerator.scaler.get_scale(), loop))
    theirs, ours = found
    assert ours[:3] == theirs[:3] == ([True, False, False], [1e-2, 1e-2 * (1 / 2), 1e-2 * (1 / 3)], 128.0)
    torch.testing.assert_close(ours[3].norms[1:], theirs[3].norms[1:], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours[3].weights(), theirs[3].weights())


# ---------------------------------------------------------------- what is refused


def test_requests_that_cannot_be_met_are_refused(accelerator_of: Callable[..., Any]) -> None:
    accelerator, model = accelerator_of(), mlp()
    plain = torch.optim.AdamW(model.parameters())

    def refused(kind: type[HostwardError], text: str, optimizer: Any = plain, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            offload(accelerator, optimizer, model, **options)

    refused(UnknownNameError, "did you mean offload_fraction", ofload_fraction=1.0)
    refused(UnknownNameError, "the given optimizer has it", lr=1.0)
    refused(ConfigError, r"torch\.optim\.sgd\.SGD", torch.optim.SGD(model.parameters()))
    refused(
        ConfigError,
        r"once, before accelerator\.prepare",
        accelerator_of().prepare(torch.optim.AdamW(model.parameters())),
    )
    refused(ConfigError, "makes it itself", hostward.AdamW(model))
    refused(ConfigError, "amsgrad=True", torch.optim.AdamW(model.parameters(), amsgrad=True))
    stepped = torch.optim.AdamW(model.parameters())
    mlp_loss(model, 0).backward()
    stepped.step()
    refused(ConfigError, "was stepped", stepped)
    scheduled = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    refused(ConfigError, "make the scheduler after", scheduled)
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    refused(ConfigError, "from_deepspeed")
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)
    refused(ConfigError, "fsdp_version=2")
    accelerator.state.distributed_type = accelerate.DistributedType.NO


def test_what_a_step_cannot_do_is_refused(accelerator_of: Callable[..., Any]) -> None:
    """Seen red: a second optimizer, which the first step alone refused."""
    accelerator = accelerator_of()
    model = mlp()
    early = offload(accelerator, torch.optim.AdamW(model.parameters()), model)
    for use in (early.step, early.state_dict, lambda: accelerator.backward(mlp_loss(model, 0))):
        with pytest.raises(ModelError, match=r"accelerator\.prepare.*after train\(\) has begun"):
            use()
    with pytest.raises(ConfigError, match=r"second offload\(\)(.|\n)*one Accelerator for each"):
        offload(accelerator, torch.optim.AdamW(model.parameters()), model)
    del early, use
    loop = Loop(accelerator, offload_fraction=1.0)
    parameters = list(loop.plain.parameters())
    for told, ask in {
        "norm_type=1": lambda: accelerator.clip_grad_norm_(parameters, 1.0, norm_type=1),
        "max_norm=0": lambda: accelerator.clip_grad_norm_(parameters, 0),
        "of a part of": lambda: accelerator.clip_grad_norm_(parameters[:-1], 1.0),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(parameters, 1.0),
    }.items():
        with pytest.raises(ConfigError, match=told):
            ask()
    other = torch.ones(2, requires_grad=True)
    other.sum().backward()
    with pytest.raises(ConfigError, match=r"optimizer does not have\n(.|\n)*one accelerator for each optimizer"):
        accelerator.clip_grad_norm_([*parameters, other], 1.0)
    loop.plain.late = torch.nn.Parameter(torch.ones(2))
    loop.plain.late.sum().backward()
    with pytest.raises(
        ConfigError, match=r"does not have: 'late'\n(.|\n)*requires_grad_\(False\)(.|\n)*add_param_group"
    ):
        accelerator.clip_grad_norm_(loop.plain.parameters(), 1.0)


# ---------------------------------------------------------------- DeepSpeed's dictionaries


def test_a_configuration_of_deepspeed_is_translated() -> None:
    auto = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": auto},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "cpu",
                "pin_memory": True,
                "ratio": 0.3,
                "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
        },
        "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "steps_per_print": 2000,
    }
    assert from_deepspeed(config) == {
        "offload_fraction": 0.3,
        "pin_gradients": True,
        "pin_weights": True,
        "weights": hostward.Weights(),
        "streamed_fraction": 0.0,
        "activations": hostward.Activations(),
    }
    assert from_deepspeed({"zero_optimization": {"stage": 2, "cpu_offload": True}}) == {"offload_fraction": 1.0}
    nothing = {"offload_optimizer": None, "offload_param": None}
    for left_out in ({"gradient_clipping": None}, {"zero_optimization": None}, {"zero_optimization": nothing}):
        assert from_deepspeed(left_out) == {"offload_fraction": 0.0}
    assert from_deepspeed({"gradient_clipping": 1}) == {"offload_fraction": 0.0, "max_grad_norm": 1.0}


def test_what_deepspeed_alone_can_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "ds_config.json"
    path.write_text(
        """{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratoi": 1}},
        "train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "OneBitAdam"}, "autotuning": {}}"""
    )
    with pytest.raises(ConfigError) as refused:
        from_deepspeed(path)
    keys = ("stage", "offload_optimizer.device", "offload_optimizer.ratoi")
    for name in (*(f"zero_optimization.{key}" for key in keys), "train_batch_size", "bf16", "optimizer", "autotuning"):
        assert f"{name}: " in refused.value.why
        assert f"{name}: " in refused.value.fix
    assert refused.value.what.startswith("7 keys")
    assert "reshard_after_forward=True" in refused.value.fix
    for section in ({"zero_optimization": []}, {"zero_optimization": {"offload_optimizer": "cpu"}}):
        with pytest.raises(ConfigError, match=r"1 keys(.|\n)*a dictionary"):
            from_deepspeed(section)
    with pytest.raises(ConfigError, match="None, which is no DeepSpeed configuration"):
        from_deepspeed(None)
