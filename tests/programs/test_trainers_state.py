"""What trainers and wrappers do with the optimizer and its state: accelerate, transformers.Trainer, TRL, Lightning, and
torch.distributed.checkpoint.state_dict. They are as their users have them; only the way to the device is counted.

Seen red with: tensors handed to prepare, `step_was_skipped` without regard to the scaler, `optimizer` left out, tokens
handed to hooks, numbers of a state not put back to names, torch's numbers taken for ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import DTYPES, Model, adamw, assert_equal, backend, mlp, mlp_loss, set_gradients, snapshot

import hostward
from hostward.errors import CheckpointError
from hostward.optim.state_dict import Unmoved
from hostward.runtime.backend import Tier

PLACES = (0.0, 0.5, 1.0)
every_place = pytest.mark.parametrize("fraction", PLACES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Moves(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that operations wrote or made while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            self.nbytes += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        return made


def bytes_on(optimizer: hostward.AdamW) -> tuple[int, int]:
    ledger = optimizer.backend.ledger
    return ledger.total_bytes(Tier.DEVICE), ledger.total_bytes(Tier.HOST)


# ---------------------------------------------------------------- accelerate


@pytest.fixture
def accelerator_of() -> Iterator[Callable[..., Any]]:
    accelerate = pytest.importorskip("accelerate")

    def make(**options: Any) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        return accelerate.Accelerator(cpu=True, **options)

    yield make
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def to_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of tensors that accelerate has asked to move."""
    import accelerate.optimizer

    moved: list[int] = []
    original = accelerate.optimizer.move_to_device

    def counted(state: Any, device: Any) -> Any:
        if isinstance(state, torch.Tensor):
            moved.append(state.nbytes)
        return original(state, device)

    monkeypatch.setattr(accelerate.optimizer, "move_to_device", counted)
    return moved


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("scaler", [False, True])
@every_dtype
@every_place
def test_prepare_moves_nothing(
    fraction: float,
    dtype: torch.dtype,
    scaler: bool,
    steps: int,
    accelerator_of: Callable[..., Any],
    to_calls: list[int],
) -> None:
    """At the start and later: no operation of torch, no byte more on device or host, and the same state."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator_of()
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    before, held = snapshot(model, optimizer), bytes_on(optimizer)
    with Moves() as moves:
        wrapped = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu") if scaler else None)
    assert (moves.nbytes, to_calls) == (0, [])
    assert bytes_on(optimizer) == held
    assert_equal(before, snapshot(model, optimizer))
    saved = wrapped.state_dict()["state"]  # anybody else gets tensors
    assert all(isinstance(value, torch.Tensor) for entry in saved.values() for value in entry.values())
    again = adamw(Model(dtype, seed=3))
    again.load_state_dict(saved and wrapped.state_dict())
    for name, entry in again.state_dict()["state"].items():
        assert_equal(entry, saved[name])


def test_a_hook_of_others_gets_tensors_even_from_prepare(accelerator_of: Callable[..., Any]) -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator_of()
    optimizer = adamw(Model())
    seen: list[bool] = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(isinstance(state["state"], dict)))
    AcceleratedOptimizer(optimizer)
    assert seen == [True]


def test_another_optimizer_asked_meanwhile_hands_out_tensors(accelerator_of: Callable[..., Any]) -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator_of()
    optimizer, other = adamw(Model()), adamw(Model())
    seen: list[bool] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append(isinstance(other.state_dict()["state"], dict)))
    AcceleratedOptimizer(optimizer)
    assert seen == [True]


def test_what_stands_for_the_state_of_another_optimizer_is_refused() -> None:
    optimizer, other = adamw(Model()), adamw(Model())
    with pytest.raises(CheckpointError, match="incomplete"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": Unmoved(other)})


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_an_accelerate_loop_is_that_of_hostward_alone(
    mixed: str, prepared: bool, accelerator_of: Callable[..., Any]
) -> None:
    """`_is_accelerate_prepared`: accelerate takes the optimizer as it is."""

    def run(fraction: float) -> dict[str, torch.Tensor]:
        accelerator = accelerator_of(mixed_precision=mixed)
        plain = mlp()
        optimizer = adamw(plain, offload_fraction=fraction, max_grad_norm=1.0)
        optimizer._is_accelerate_prepared = prepared
        model, wrapped = accelerator.prepare(plain, optimizer)
        assert (wrapped is optimizer) is prepared
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(wrapped, 1.0, 0.1))
        for step in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(mlp_loss(model, step))
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
        return snapshot(plain, optimizer)

    results = [run(fraction) for fraction in PLACES]
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


def test_a_skipped_step_is_told_where_a_scaler_took_part() -> None:
    model = mlp()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    told = []
    for factor, scaled in ((1.0, True), (float("inf"), True), (1.0, True), (float("inf"), False)):
        optimizer.zero_grad()
        loss = mlp_loss(model, 0) * factor
        (scaler.scale(loss) if scaled else loss).backward()
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        assert not hasattr(optimizer, "optimizer")
        told.append((optimizer.step_was_skipped, optimizer.last_step_skipped))
    assert told == [(False, False), (True, True), (False, False), (False, True)]


# ---------------------------------------------------------------- transformers.Trainer and TRL


def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 2048}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32))


def arguments(folder: Path, kind: Any = None, **options: Any) -> dict[str, Any]:
    from transformers import TrainingArguments

    common = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 2,
        "weight_decay": 0.1,
    }
    return (kind or TrainingArguments)(str(folder), **{**common, **options})


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 2048, (24, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(folder: Path, fraction: float, *, model: torch.nn.Module | None = None, **options: Any) -> Any:
    from transformers import Trainer

    trainer = Trainer(
        model=tiny_llama() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(hostward.AdamW, {"lr": 1e-3, "offload_fraction": fraction, "backend": backend()}),
    )
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.optimizer.optimizer.wait()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_trainer_makes_the_optimizer_and_trains_to_the_same_bits(
    options: dict[str, Any], tmp_path: Path, accelerator_of: Callable[..., Any], to_calls: list[int]
) -> None:
    found = {}
    for fraction in PLACES:
        trainer = trained(tmp_path / str(fraction), fraction, **options)
        optimizer = trainer.optimizer.optimizer
        assert isinstance(optimizer, hostward.AdamW)
        assert abs(optimizer.plan.placed_fraction - fraction) < 0.3
        assert [t.name for t in optimizer._tracked if t.name == "lm_head.weight"]
        assert {g["weight_decay"] for g in optimizer.param_groups} == {0.1, 0.0}
        found[fraction] = weights(trainer)
    assert to_calls == []
    assert_equal(found[0.0], found[0.5])
    assert_equal(found[0.0], found[1.0])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer_goes_on_from_its_checkpoint_at_another_share(
    tmp_path: Path, accelerator_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer

    whole = weights(trained(tmp_path / "a", 1.0))
    caplog.clear()
    model = tiny_llama()
    optimizer = hostward.AdamW(model, lr=1e-3, offload_fraction=0.5, weight_decay=0.1)
    decays = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    groups = [
        {"params": list(decays.items()), "weight_decay": 0.1},
        {"params": [(n, p) for n, p in model.named_parameters() if n not in decays], "weight_decay": 0.0},
    ]
    optimizer = hostward.AdamW(groups, lr=1e-3, offload_fraction=0.5, module=model)
    trainer = Trainer(model=model, args=arguments(tmp_path / "b"), train_dataset=rows(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_equal(whole, weights(trainer))
    assert [r.getMessage() for r in caplog.records if r.name == "hostward" and r.levelname == "WARNING"] == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trl_trains_to_the_same_bits(tmp_path: Path, accelerator_of: Callable[..., Any]) -> None:
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, default_data_collator
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    found = {}
    for fraction in PLACES:
        torch.manual_seed(3)
        model = get_peft_model(tiny_llama(), LoraConfig(r=64, target_modules=["q_proj", "v_proj", "up_proj"]))
        data = datasets.Dataset.from_list(
            [{k: v.tolist() for k, v in row.items()} | {"attention_mask": [1] * 16} for row in rows()]
        )
        trainer = SFTTrainer(
            model=model,
            args=arguments(
                tmp_path,
                SFTConfig,
                dataset_kwargs={"skip_prepare_dataset": True},
                remove_unused_columns=False,
                save_strategy="no",
            ),
            train_dataset=data,
            data_collator=default_data_collator,
            processing_class=tokenizer,
            optimizer_cls_and_kwargs=(hostward.AdamW, {"lr": 1e-3, "offload_fraction": fraction}),
        )
        trainer.train()
        found[fraction] = weights(trainer)
    assert_equal(found[0.0], found[0.5])
    assert_equal(found[0.0], found[1.0])


# ---------------------------------------------------------------- Lightning


def lightning_fit(folder: Path, fraction: float, precision: str, **options: Any) -> dict[str, torch.Tensor]:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return (self.net(batch).float() - batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.made = hostward.AdamW(self.parameters(), lr=1e-2, offload_fraction=fraction, max_grad_norm=1.0)
            return self.made

    data = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(folder / "saved.ckpt")
    return snapshot(module.net, module.made)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_names_parameters_moves_no_state_and_trains_to_the_same_bits(precision: str, tmp_path: Path) -> None:
    results = [lightning_fit(tmp_path, fraction, precision) for fraction in PLACES]
    assert any(name.startswith("exp_avg net.") for name in results[0])
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["optimizer_states"][0]
    assert saved["optimizer"] == "hostward.AdamW"
    assert isinstance(saved["state"], dict)


def test_lightning_finds_no_state_to_move() -> None:
    optimizers = pytest.importorskip("lightning.fabric.utilities.optimizer")
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=0.5)
    set_gradients(model, 0)
    optimizer.step()
    with Moves() as moves:
        optimizers._optimizer_to_device(optimizer, torch.device("cpu"))
    assert moves.nbytes == 0


@pytest.mark.filterwarnings("ignore")
def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric_of = pytest.importorskip("lightning.fabric")
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1)

    def made(fraction: float) -> tuple[Any, Any, torch.nn.Module, hostward.AdamW]:
        plain = mlp(torch.bfloat16)
        optimizer = adamw(plain, offload_fraction=fraction)
        return (*fabric.setup(plain, optimizer), plain, optimizer)

    def go_on(model: Any, optimizer: Any, first: int) -> None:
        for step in range(first, first + 2):
            optimizer.zero_grad()
            fabric.backward((model(torch.ones(2, 32, dtype=torch.bfloat16) * step).float()).square().mean())
            optimizer.step()

    model, wrapped, plain, optimizer = made(0.0)
    go_on(model, wrapped, 0)
    fabric.save(tmp_path / "f.ckpt", {"model": model, "optimizer": wrapped})
    go_on(model, wrapped, 2)
    again, wrapped_again, plain_again, optimizer_again = made(1.0)
    fabric.load(tmp_path / "f.ckpt", {"model": again, "optimizer": wrapped_again})
    go_on(again, wrapped_again, 2)
    assert_equal(snapshot(plain, optimizer), snapshot(plain_again, optimizer_again))


# ---------------------------------------------------------------- torch.distributed.checkpoint


@pytest.mark.parametrize("whole", [False, True])
@every_place
def test_the_state_dict_functions_of_distributed_checkpoint(fraction: float, whole: bool) -> None:
    """They number parameters; the names that groups hold bring the state back to them."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        get_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )

    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)

    def made(place: float, seed: int) -> tuple[torch.nn.Module, hostward.AdamW]:
        model = mlp(torch.bfloat16, seed)
        names = [n for n, _ in model.named_parameters()]
        named = dict(model.named_parameters())
        groups = [
            {"params": [(n, named[n]) for n in part], "lr": 1e-2 * (i + 1)}
            for i, part in enumerate(([n for n in names if "bias" in n], [n for n in names if "bias" not in n]))
        ]
        return model, adamw(groups, offload_fraction=place, module=model)

    model, optimizer = made(fraction, 0)
    mlp_loss(model, 0).backward()
    optimizer.step()
    expected = snapshot(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other, target = made(1 - fraction, 1)
    set_optimizer_state_dict(other, target, saved, options=options)
    assert_equal(expected, snapshot(other, target))
    both = get_state_dict(model, optimizer, options=options)
    other, target = made(1 - fraction, 2)
    set_state_dict(other, target, model_state_dict=both[0], optim_state_dict=both[1], options=options)
    assert_equal(expected, snapshot(other, target))


@pytest.mark.parametrize("both", [False, True])
def test_a_flattened_state_is_refused_before_it_is_written(both: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

    model = mlp()
    optimizer = adamw(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    ask = get_state_dict if both else get_optimizer_state_dict
    with pytest.raises(CheckpointError, match="leave flatten_optimizer_state_dict out"):
        ask(model, optimizer, options=options)
    assert len(get_optimizer_state_dict(model, optimizer)["state"]) == len(list(model.parameters()))


def test_a_numbered_state_of_torch_is_not_taken_for_ours() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = mlp()
    plain = torch.optim.AdamW(model.named_parameters())
    mlp_loss(model, 0).backward()
    plain.step()
    optimizer = adamw(model)
    for state in (plain.state_dict(), get_optimizer_state_dict(model, plain)):
        with pytest.raises(CheckpointError, match="not an optimizer state of hostward"):
            optimizer.load_state_dict(state)
