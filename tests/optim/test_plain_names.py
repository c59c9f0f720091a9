"""State and checkpoints go by the names of the plain module, whatever it is compiled or wrapped in.

Seen red with: names kept as given, `module.` kept, `module.` always taken off, layers looked for under wrapped names,
checkpoints saved or loaded under the names given, state entries renamed over one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import LATEST, MIXES, Heard, Net, loss_of, make, microbatch, tokens
from optimizer_cases import adamw, assert_equal, snapshot
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hostward
from hostward.checkpoint import api, validate
from hostward.errors import CheckpointError, ModelError
from hostward.runtime.simulated.backend import Order, SimulatedBackend

# The compiler looks at .grad of everything, and warns of what it does itself; so does process group set-up.
pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = [name for name, _ in Net().named_parameters()]


def compiled(model: Net) -> torch.nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_layers(model: Net) -> torch.nn.Module:
    model.embed = torch.compile(model.embed, backend="eager")  # type: ignore[assignment]
    for i in (0, 2):
        model.blocks[i] = torch.compile(model.blocks[i], backend="eager")  # type: ignore[assignment]
    return model


def checkpointed_layers(model: Net) -> torch.nn.Module:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


def data_parallel(model: Net) -> torch.nn.Module:
    return torch.nn.DataParallel(model)


def compiled_data_parallel(model: Net) -> torch.nn.Module:
    return torch.compile(data_parallel(compiled_layers(model)), backend="eager")  # type: ignore[return-value]


def distributed(model: Net) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def distributed_compiled(model: Net) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(compiled(model))


WRAPPINGS: dict[str, Callable[[Net], torch.nn.Module]] = {
    "compiled": compiled,
    "compiled layers": compiled_layers,
    "checkpointed layers": checkpointed_layers,
    "data parallel": data_parallel,
    "compiled data parallel": compiled_data_parallel,
    "distributed": distributed,
    "distributed, compiled": distributed_compiled,
}
every_wrapping = pytest.mark.parametrize("wrapping", WRAPPINGS)
trained_wrapping = pytest.mark.parametrize(
    "wrapping", ["compiled", "checkpointed layers", "compiled data parallel", "distributed, compiled"]
)
"""The others are parts of these."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def one_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of this process alone, where a wrapper needs one."""
    if "distributed" not in request.node.name:
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped(wrapping: str, order: Order | None = None, **options: Any) -> tuple[torch.nn.Module, hostward.AdamW]:
    model = WRAPPINGS[wrapping](Net())
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    return model, adamw(model, backend=backend, **{"max_grad_norm": 0.5, **MIXES["mixed"], **options})


def train(model: torch.nn.Module, optimizer: hostward.AdamW, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@every_wrapping
def test_state_has_the_names_of_the_plain_module(wrapping: str) -> None:
    plain = make("mixed")[1]
    optimizer = wrapped(wrapping)[1]
    state = optimizer.state_dict()
    assert list(state["state"]) == NAMES
    assert state["param_groups"][0]["params"] == NAMES
    assert optimizer.plan == plain.plan
    assert optimizer.schedule.to_text() == plain.schedule.to_text()


@trained_wrapping
def test_state_goes_over_from_wrapped_to_plain_and_back(wrapping: str) -> None:
    """Training goes on bit for bit, as if it had never changed."""
    model, optimizer = make("mixed")
    train(model, optimizer, 0, steps=4)
    expected = snapshot(model, optimizer)
    for first_wrapped in (True, False):
        torch.compiler.reset()
        pair, plain = wrapped(wrapping), make("mixed")
        (source, saver), (target, loader) = (pair, plain) if first_wrapped else (plain, pair)
        train(source, saver, 0)
        loader.load_state_dict(saver.state_dict())
        with torch.no_grad():  # fp32 weights are no part of the state
            for p, q in zip(target.parameters(), source.parameters(), strict=True):
                p.copy_(q)
        train(target, loader, 2)
        found = snapshot(target, loader)
        assert_equal(dict(zip(expected, found.values(), strict=True)), expected)


@trained_wrapping
def test_each_layer_of_a_wrapped_module_waits_for_its_weights(wrapping: str) -> None:
    results = []
    for order, mix in ((None, "device"), (LATEST, "mixed")):
        torch.compiler.reset()
        model, optimizer = wrapped(wrapping, order, **MIXES[mix])
        outputs = []
        for step in range(3):
            optimizer.zero_grad()
            # DistributedDataParallel averages gradients after the hooks that would take them.
            with microbatch(optimizer, not wrapping.startswith("distributed"), True):
                out = model(tokens(step))
                (out - 1.0).square().mean().backward()
            outputs.append(out.detach().clone())
            optimizer.step()
        results.append({"outputs": torch.stack(outputs)})
    assert_equal(*results)


@pytest.mark.parametrize("mix", ["host", "streamed"])
def test_what_follows_the_last_layer_arrives_with_it_inside_a_compiled_part(mix: str) -> None:
    """Numbered layers are found behind a trace in the middle of their path."""
    model = torch.nn.ModuleDict({"inner": compiled(Net()), "outer": torch.nn.Linear(3, 3)})
    backend = SimulatedBackend(threads=1, order=LATEST)
    optimizer = adamw(model, backend=backend, max_grad_norm=0.5, **MIXES[mix])
    inner = model["inner"]
    loss_of(inner, 0).backward()
    optimizer.step()
    heard = Heard(backend)
    inner.blocks[2](torch.ones(2, 32))
    assert [name[5:] for name in heard.arrived()][-3:] == ["inner.blocks.2", "inner.norm", "inner.head"]
    optimizer.wait()


def with_traces(state: dict[str, Any], spell: Callable[[str], str]) -> dict[str, Any]:
    """A state as a version that kept the traces of wrappers would have saved it."""
    groups = [{**g, "params": [spell(name) for name in g["params"]]} for g in state["param_groups"]]
    return {**state, "state": {spell(name): entry for name, entry in state["state"].items()}, "param_groups": groups}


SPELLINGS: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "layers": lambda name: name.replace("blocks.1.", "blocks.1._orig_mod."),
    "data parallel": lambda name: f"module.{name}",
    "both": lambda name: f"_orig_mod.module._orig_mod.{name}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("wrapping", ["plain", "compiled", "data parallel"])
def test_a_state_with_traces_in_its_names_loads(wrapping: str, spelling: str) -> None:
    source, saver = make("mixed", torch.bfloat16)
    train(source, saver, 0)
    model = Net(torch.bfloat16)
    model.scale.data.fill_(3.0)
    optimizer = adamw(model if wrapping == "plain" else WRAPPINGS[wrapping](model))
    optimizer.load_state_dict(with_traces(saver.state_dict(), SPELLINGS[spelling]))
    assert_equal(snapshot(model, optimizer), snapshot(source, saver))


def test_an_optimizer_over_data_parallel_names_loads_plain_ones() -> None:
    """Names given by hand, without the module: `module.` may be the model's own word, and stays."""
    source, saver = make("host")
    train(source, saver, 0)
    model = Net()
    optimizer = adamw(data_parallel(model).named_parameters())
    assert list(optimizer.state_dict()["state"]) == [f"module.{name}" for name in NAMES]
    optimizer.load_state_dict(saver.state_dict())
    assert optimizer.state_dict()["state"]["module.head.weight"]["step"] == 2


@pytest.mark.parametrize("wrapping", ["compiled", "data parallel", "compiled data parallel"])
def test_groups_of_names_of_the_wrapped_module(wrapping: str) -> None:
    model = WRAPPINGS[wrapping](Net())
    named = list(model.named_parameters())
    groups = [{"params": [x for x in named if x[1].ndim > 1]}, {"params": [x for x in named if x[1].ndim < 2]}]
    optimizer = adamw(groups, module=model)
    assert sorted(optimizer.state_dict()["state"]) == sorted(NAMES)
    inner = adamw(list(Net().named_parameters()), module=model)
    assert list(inner.state_dict()["state"]) == NAMES


@pytest.mark.parametrize("wrapping", ["compiled", "data parallel", "compiled data parallel"])
def test_a_group_added_under_names_of_the_wrapped_module(wrapping: str) -> None:
    model = WRAPPINGS[wrapping](Net())
    named = list(model.named_parameters())
    optimizer = adamw(named[:-2], module=model)
    optimizer.add_param_group({"params": named[-2:]})
    assert list(optimizer.state_dict()["state"]) == NAMES


def test_a_word_module_of_the_model_itself_stays() -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 3)})
    for m in (model, torch.nn.DataParallel(model)):
        assert list(adamw(m).state_dict()["state"]) == ["module.weight", "module.bias"]
    named = list(model.named_parameters())
    assert list(adamw(named, module=torch.nn.DataParallel(model)).state_dict()["state"]) == [n for n, _ in named]


def test_names_that_become_equal_are_refused() -> None:
    with pytest.raises(ModelError, match="two parameters are named 'a'") as caught:
        adamw([("a", torch.nn.Parameter(torch.zeros(3))), ("_orig_mod.a", torch.nn.Parameter(torch.zeros(3)))])
    assert "_orig_mod." in caught.value.why
    optimizer = adamw([("a", torch.nn.Parameter(torch.zeros(3)))])
    state = optimizer.state_dict()
    state["state"]["_orig_mod.a"] = state["state"]["a"]
    with pytest.raises(CheckpointError, match="both name 'a'"):
        optimizer.load_state_dict(state)


# ---------------------------------------------------------------- checkpoint files


def parts(model: torch.nn.Module, optimizer: hostward.AdamW | None = None) -> dict[str, torch.Tensor]:
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    entries = {} if optimizer is None else optimizer.state_dict(copy=False)["state"]
    return tensors | {f"optimizer/{n}/{role}": t for n, entry in entries.items() for role, t in entry.items()}


@trained_wrapping
def test_checkpoints_go_over_from_wrapped_to_plain_and_back(wrapping: str, tmp_path: Path) -> None:
    for first_wrapped in (True, False):
        torch.compiler.reset()
        source, saver = wrapped(wrapping) if first_wrapped else make("mixed")
        train(source, saver, 0)
        path = api.save(tmp_path / str(first_wrapped), 2, tensors=parts(source, saver), plain={})
        target, loader = make("mixed") if first_wrapped else wrapped(wrapping)
        into = {name: torch.empty_like(t) for name, t in parts(target, loader).items()}
        api.load(path, into)
        for (name, mine), theirs in zip(into.items(), parts(source, saver).values(), strict=True):
            assert torch.equal(mine, theirs), name


def test_a_checkpoint_of_a_compiled_model_holds_plain_names(tmp_path: Path) -> None:
    path = api.save(tmp_path, 0, tensors=parts(compiled(Net())), plain={})
    assert sorted(api.tensor_index(path)) == sorted(f"model/{name}" for name in NAMES)


def test_an_older_checkpoint_with_traces_loads_and_what_is_ignored_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    with monkeypatch.context() as older:
        older.setattr(validate, "by_plain_name", lambda names: {name: name for name in names})
        tensors = parts(compiled(model)) | {"optimizer/_orig_mod.scale/step": torch.tensor(3)}
        path = api.save(tmp_path, 0, tensors=tensors, plain={})
    assert "model/_orig_mod.scale" in api.tensor_index(path)
    target = Net()
    with torch.no_grad():
        target.scale.zero_()
    api.load(path, parts(target), ignore={"optimizer/scale/step"})
    assert torch.equal(target.scale, model.scale)
    with pytest.raises(CheckpointError, match=r"1 only in the checkpoint: optimizer/_orig_mod\.scale/step"):
        api.load(path, parts(target))


def test_tensors_whose_names_become_equal_are_refused(tmp_path: Path) -> None:
    tensors = {"model/w": torch.zeros(3), "model/_orig_mod.w": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"both name 'model/w'"):
        api.save(tmp_path, 0, tensors=tensors, plain={})
    assert not list(tmp_path.iterdir())
