"""Trainer and TRL's trainers log and train as with torch's own AdamW, and to the same bits at every fraction.

Seen red: layers that stay attached, and an error of theirs in place of the program's own; torch's state with `fused`
in its groups.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import assert_equal, backend

import hostward
from hostward import cli
from hostward.errors import ConfigError, HostwardError, UnknownNameError
from hostward.runtime.backend import Lane

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hostward.integrations.transformers import OffloadingTrainer, offloading  # noqa: E402

LATE = set(Lane) - {Lane.COMPUTE}
LAYERS = {
    "activations": hostward.Activations(num_layers=1, min_bytes=0),
    "weights": hostward.Weights(num_layers=2, min_elements=0),
    "streamed_fraction": 0.0,
}
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_accelerator_is_left() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def tiny_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32))


def rows(count: int = 14) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 512, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def made(kind: Any, folder: Path, *, model: Any = None, optimizers: Any = (None, None), **options: Any) -> Any:
    """Two epochs of seven batches in windows of four and three."""
    common = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    held = {} if "model_init" in options else {"model": tiny_llama() if model is None else model}
    held |= {"model_init": options.pop("model_init")} if "model_init" in options else {}
    args = TrainingArguments(str(folder), **{**common, **options})
    return kind(**held, args=args, train_dataset=rows(), eval_dataset=rows(4), optimizers=optimizers)


def at(fraction: float, trainer: Any = Trainer, **options: Any) -> Any:
    return offloading(trainer, offload_fraction=fraction, backend=backend(late=LATE), **options)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_alike(ours: Any, theirs: Any, rtol: float = 1e-4) -> None:
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        torch.testing.assert_close(logged(ours, key), logged(theirs, key), rtol=rtol, atol=1e-7)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=rtol, atol=1e-5)


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "save_total_limit": 2,
}


def test_trainer_logs_and_trains_as_with_torch_and_to_the_same_bits(tmp_path: Path) -> None:
    """Evaluation and checkpoints in between, with weights and activations on the host as well."""
    theirs = made(Trainer, tmp_path / "theirs", **BEST)
    theirs.train()
    found = []
    for number, kind in enumerate((at(0.0), at(0.5), at(1.0), at(1.0, **LAYERS))):
        ours = made(kind, tmp_path / str(number), **BEST)
        ours.train()
        assert isinstance(ours.optimizer.optimizer, hostward.AdamW)
        assert abs(ours.optimizer.optimizer.plan.placed_fraction - (0.0, 0.5, 1.0, 1.0)[number]) < 0.3
        assert [g["weight_decay"] for g in ours.optimizer.param_groups] == [0.1, 0.0]
        assert Path(ours.state.best_model_checkpoint).name == Path(theirs.state.best_model_checkpoint).name
        assert ours.optimizer.attachment is None
        assert_alike(ours, theirs)
        found.append((logged(ours, "loss"), logged(ours, "grad_norm"), logged(ours, "eval_loss"), weights(ours)))
    assert len(found[0][1]) == 4
    for other in found[1:]:
        assert other[:3] == found[0][:3]
        assert_equal(other[3], found[0][3])


def test_runs_go_on_from_checkpoints_of_both(tmp_path: Path) -> None:
    keeping = {"save_strategy": "steps", "save_steps": 2}
    theirs, ours = made(Trainer, tmp_path / "theirs", **keeping), made(at(1.0), tmp_path / "ours", **keeping)
    theirs.train()
    ours.train()
    again = made(at(0.5), tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_equal(weights(again), weights(ours))
    from_torch = made(at(1.0), tmp_path / "from")
    from_torch.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-2"))
    torch.testing.assert_close(weights(from_torch), weights(theirs), rtol=1e-4, atol=1e-5)
    path = tmp_path / "ours" / "checkpoint-2" / "optimizer.pt"
    torch.save(hostward.convert.to_torch_adamw(torch.load(path))[0], path)
    to_torch = made(Trainer, tmp_path / "to")
    to_torch.train(resume_from_checkpoint=str(path.parent))
    torch.testing.assert_close(weights(to_torch), weights(theirs), rtol=1e-4, atol=1e-5)


class Mine(Trainer):
    """A user's own class: another loss, an optimizer of its own, and steps that are counted."""

    counted = 0

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        self.counted += 1
        return super().training_step(*args, **options)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        out = model(**inputs)
        return (2 * out.loss, out) if return_outputs else 2 * out.loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.3)
        return self.optimizer


class MineOffloaded(OffloadingTrainer, Mine):
    offload_options = {"offload_fraction": 1.0}  # noqa: RUF012


def test_methods_that_users_override_still_run(tmp_path: Path) -> None:
    theirs, *both = trainers = [made(kind, tmp_path) for kind in (Mine, at(1.0, Mine), MineOffloaded)]
    for trainer in trainers:
        trainer.train()
        assert trainer.counted == 14
    for ours in both:
        assert_alike(ours, theirs)


def by_hand(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder)
    trainer.create_optimizer_and_scheduler(4)
    trainer.train()
    return trainer


def twice(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder)
    trainer.train()
    trainer.train()
    return trainer


def new_models(kind: Any, folder: Path) -> Any:
    trainer = made(kind, folder, model_init=tiny_llama)
    trainer.train()
    trainer.args.learning_rate = 3e-3  # as a search over hyper-parameters does
    trainer.train()
    return trainer


def adapters(kind: Any, folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    trainer = made(kind, folder, model=peft.get_peft_model(tiny_llama(), lora), gradient_checkpointing=True, **BEST)
    trainer.train()
    return trainer


@pytest.mark.parametrize("use", [by_hand, twice, new_models, adapters])
def test_each_way_to_train_is_as_with_torch(use: Any, tmp_path: Path) -> None:
    assert_alike(use(at(1.0, **LAYERS), tmp_path / "ours"), use(Trainer, tmp_path / "theirs"))


def test_sft_of_trl_trains_as_with_torch(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, default_data_collator

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    trainers = []
    for kind in (trl.SFTTrainer, at(1.0, trl.SFTTrainer)):
        rest = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "logging_steps": 1}
        data = [{k: v.tolist() for k, v in row.items()} | {"attention_mask": [1] * 16} for row in rows(8)]
        args = trl.SFTConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, save_strategy="no", **rest,
        )  # fmt: skip
        trainer = kind(
            model=tiny_llama(), args=args, train_dataset=datasets.Dataset.from_list(data),
            data_collator=default_data_collator, processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        trainers.append(trainer)
    assert_alike(trainers[1], trainers[0])


class StoppedError(Exception):
    pass


class StopsOnce(TrainerCallback):
    """Fails in the second step, at one of the callbacks' events."""

    def __init__(self, event: str) -> None:
        self.armed = True
        setattr(self, event, self._stop)

    def _stop(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.armed and state.global_step == 1:
            self.armed = False
            raise StoppedError


@pytest.mark.parametrize("event", ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"])
def test_training_that_failed_leaves_layers_detached_and_may_begin_again(event: str, tmp_path: Path) -> None:
    trainers = [made(kind, tmp_path) for kind in (Trainer, at(0.0), at(1.0, **LAYERS))]
    for trainer in trainers:
        trainer.add_callback(StopsOnce(event))
        with pytest.raises(StoppedError):
            trainer.train()
    theirs, ours, attached = trainers
    assert attached.optimizer.attachment is None
    hostward.attach(attached.model, activations=1).detach()  # refused where something is attached
    for trainer in trainers:
        trainer.train()
    assert_alike(attached, theirs)
    assert_equal(weights(attached), weights(ours))


class SleepsOnce(StopsOnce):
    def _stop(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.armed and state.global_step == 1:
            given["optimizer"].optimizer.sleep()
        super()._stop(args, state, control)


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_step_end"])
def test_training_that_failed_asleep_raises_its_own_error_and_may_begin_again_awake(event: str, tmp_path: Path) -> None:
    """Seen red: layers that cannot be detached while weights sleep, whose error stood in place of the program's own."""
    ours, attached = made(at(0.0), tmp_path), made(at(1.0, **LAYERS), tmp_path)
    for trainer, callback in ((ours, StopsOnce(event)), (attached, SleepsOnce(event))):
        trainer.add_callback(callback)
        with pytest.raises(StoppedError):
            trainer.train()
    attached.optimizer.optimizer.wake()
    for trainer in (ours, attached):
        trainer.train()
    assert attached.optimizer.attachment is None
    assert_equal(weights(attached), weights(ours))


class StopsInWindow(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 1


def test_training_that_stops_within_a_window_ends_as_with_torch(tmp_path: Path) -> None:
    """Seen red: gradients that are accumulated on the host, with which layers could not be detached."""
    trainers = [made(kind, tmp_path) for kind in (Trainer, at(1.0, **LAYERS, gradients="host"))]
    for trainer in trainers:
        trainer.add_callback(StopsInWindow())
        trainer.train()
        assert trainer.state.global_step == 1
    assert trainers[1].optimizer.attachment is None
    assert_alike(trainers[1], trainers[0])


def test_requests_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    assert at(0.5) is not at(1.0)
    assert offloading(Trainer, offload_fraction=1.0) is offloading(Trainer, offload_fraction=1.0)
    with pytest.raises(ConfigError, match="no class of trainers"):
        offloading(Trainer(model=tiny_llama(), args=TrainingArguments(str(tmp_path), use_cpu=True)))
    with pytest.raises(ConfigError, match=r"optim='sgd' makes torch\.optim\.sgd\.SGD"):
        made(at(1.0), tmp_path, optim="sgd").train()
    model, other = tiny_llama(), tiny_llama()
    for optimizer, text in (
        (
            torch.optim.SGD(model.parameters()),
            r"(?s)optimizers= holds torch\.optim\.sgd\.SGD.*leave optimizers= out.*offload_optimizer_states",
        ),
        (hostward.AdamW(model), r"makes hostward\.AdamW itself"),
        (torch.optim.AdamW(other.parameters()), "those of another model"),
    ):
        with pytest.raises(HostwardError, match=text):
            made(at(1.0), tmp_path, model=model, optimizers=(optimizer, None)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    both = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match=r"optimizers= holds a learning-rate scheduler(.|\n)*lr_scheduler_type"):
        made(at(1.0), tmp_path, model=model, optimizers=both).train()
    with pytest.raises(ConfigError, match=r"TrainingArguments\(max_grad_norm"):
        made(at(1.0, max_grad_norm=1.0), tmp_path)
    with pytest.raises(UnknownNameError, match=r"offloading\(\) has no option 'activation'(.|\n)*mean activations"):
        at(1.0, activation=1)


def test_without_a_word_on_what_all_state_is_offloaded(tmp_path: Path) -> None:
    for options, fraction in (({}, 1.0), ({"activations": 1}, 0.0)):
        trainer = made(offloading(Trainer, **options), tmp_path, max_steps=1)
        trainer.train()
        assert trainer.optimizer.optimizer.plan.placed_fraction == fraction


@pytest.mark.parametrize(("name", "needs"), [("trainer", "transformers"), ("trl_sft", "trl")])
def test_the_example_runs(name: str, needs: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(needs)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert "optimizer state on the host: asked 1.0000, placed 1.0000" in capsys.readouterr().out


def test_a_plan_for_the_folder_of_a_configuration_is_carried_out(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    tiny_llama().config.save_pretrained(tmp_path)
    sizes = ["--seq", "16", "--batch", "8", "--micro-batch", "2", "--hardware", "h200", "--device-memory", "65.5MiB"]
    assert cli.main(["plan", "--config", str(tmp_path), *sizes, "--json", str(tmp_path / "plan.json")]) == 0
    trainers = []
    for where in ({"offload_fraction": 0.0}, {"plan": str(tmp_path / "plan.json")}):
        kind = offloading(Trainer, backend=backend(late=LATE), **where)
        model = tiny_llama().to(torch.bfloat16)
        trainers.append(made(kind, tmp_path, model=model))
        trainers[-1].train()
    none, planned = trainers
    assert planned.optimizer.optimizer.plan.placed_fraction > 0.5
    assert logged(planned, "grad_norm") == logged(none, "grad_norm")
    assert_equal(weights(planned), weights(none))
