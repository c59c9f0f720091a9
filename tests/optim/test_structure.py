"""Layers replaced, tied, moved or added in the module after its optimizer was made.

Seen red with: no look at the module, children or parameters left out of it, what was looked at not noted, what is added
at the end overlooked, shared modules looked at once, wrapped layers refused, newcomers forgotten once they were looked
at, parameters of other optimizers taken for newcomers, no look at the module when a group is added, what was frozen not
looked at, and refused while it still is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from networks import MIXES, Block, Net, loss_of, make
from optimizer_cases import adamw, assert_equal, same_bits, snapshot
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hostward
from hostward.errors import ModelError
from hostward.optim import master_sync

mixes = pytest.mark.parametrize("mix", ["device", "mixed"])


def backward(model: torch.nn.Module, seed: int = 0) -> None:
    loss_of(model, seed).backward()


def one_step(model: torch.nn.Module, optimizer: hostward.AdamW, seed: int = 0) -> None:
    optimizer.zero_grad()
    backward(model, seed)
    optimizer.step()


def replace_block(model: Net) -> None:
    model.blocks[1] = Block(32)


def replace_linear(model: Net) -> None:
    model.blocks[1].down = torch.nn.Linear(32, 32)


def replace_frozen(model: Net) -> None:
    model.blocks[1].down = torch.nn.Linear(32, 32).requires_grad_(False)


def replace_all_blocks(model: Net) -> None:
    model.blocks = torch.nn.ModuleList(Block(32) for _ in range(3))


def put_in_front(model: Net) -> None:
    model.blocks.insert(0, Block(32))


def replace_parameter(model: Net) -> None:
    model.blocks[1].down.weight = torch.nn.Parameter(torch.zeros(32, 32))


def replace_the_module_s_own(model: Net) -> None:
    model.scale = torch.nn.Parameter(torch.ones(1))


def tie_layers(model: Net) -> None:
    model.blocks[1] = model.blocks[0]


def tie_weights(model: Net) -> None:
    model.blocks[1].down.weight = model.blocks[0].down.weight


def swap_layers(model: Net) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def take_out_first(model: Net) -> None:
    del model.blocks[0]


REFUSED: dict[str, tuple[Callable[[Net], None], str]] = {
    "block": (replace_block, r"'blocks\.1\.norm\.weight' was replaced .* together with its layer 'blocks\.1\.norm'"),
    "linear": (replace_linear, r"'blocks\.1\.down\.weight' was replaced .* with its layer 'blocks\.1\.down'"),
    "frozen": (replace_frozen, r"'blocks\.1\.down\.weight' was replaced"),
    "all blocks": (replace_all_blocks, r"'blocks\.0\.norm\.weight' was replaced .* with its layer 'blocks\.0\.norm'"),
    "in front": (put_in_front, r"'blocks\.0\.norm\.weight' was replaced"),
    "parameter": (replace_parameter, r"'blocks\.1\.down\.weight' was replaced by another Parameter object$"),
    "of the root": (replace_the_module_s_own, r"'scale' was replaced by another Parameter object$"),
    "tied layers": (tie_layers, r"'blocks\.1\.norm\.weight' is now the parameter that was 'blocks\.0\.norm\.weight'"),
    "tied weights": (tie_weights, r"'blocks\.1\.down\.weight' is now .* was 'blocks\.0\.down\.weight'"),
    "swapped": (swap_layers, r"'blocks\.0\.norm\.weight' is now .* was 'blocks\.1\.norm\.weight'"),
    "first taken out": (take_out_first, r"'blocks\.0\.norm\.weight' is now .* was 'blocks\.1\.norm\.weight'"),
}


@pytest.mark.parametrize("case", REFUSED)
@mixes
def test_another_parameter_in_a_known_place_is_refused_and_nothing_changes(mix: str, case: str) -> None:
    change, text = REFUSED[case]
    model, optimizer = make(mix)
    one_step(model, optimizer)
    modules = list(model.blocks)
    inner = [(m, dict(m._modules), dict(m._parameters)) for m in model.modules()]
    before = snapshot(model, optimizer)
    change(model)
    optimizer.zero_grad()
    backward(model)
    for call in (optimizer.step, optimizer.state_dict, optimizer.step):
        with pytest.raises(ModelError, match=text.replace("$", r"\n")) as caught:
            call()
        assert "new optimizer" in caught.value.fix
    for m, children, parameters in inner:
        m._modules.clear()
        m._modules.update(children)
        m._parameters.clear()
        m._parameters.update(parameters)
    assert list(model.blocks) == modules
    assert_equal(before, snapshot(model, optimizer))
    one_step(model, optimizer)


@mixes
def test_a_replaced_layer_is_noticed_at_whatever_step_it_comes(mix: str) -> None:
    model, optimizer = make(mix)
    for step in range(3):
        one_step(model, optimizer, step)
    model.blocks[2].act = torch.nn.Tanh()  # a change that does no harm
    one_step(model, optimizer, 3)
    replace_block(model)
    with pytest.raises(ModelError, match=r"layer 'blocks\.1\.norm'"):
        one_step(model, optimizer, 4)


@mixes
def test_groups_by_name_notice_with_the_module_named(mix: str) -> None:
    model = Net()
    optimizer = adamw(list(model.named_parameters()), module=model)
    replace_linear(model)
    with pytest.raises(ModelError, match="was replaced"):
        one_step(model, optimizer)


def compile_layer(model: Net) -> None:
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]


def checkpoint_layer(model: Net) -> None:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])


def hide_in_sequential(model: Net) -> None:
    model.blocks[1] = torch.nn.Sequential(model.blocks[1])


def take_out_last(model: Net) -> None:
    del model.blocks[2]


def with_a_frozen_newcomer(model: Net) -> None:
    model.extra = torch.nn.Linear(3, 3).requires_grad_(False)


def with_an_unused_newcomer(model: Net) -> None:
    model.extra = torch.nn.Linear(3, 3)


HARMLESS = {
    "compiled": compile_layer,
    "checkpointed": checkpoint_layer,
    "in a Sequential": hide_in_sequential,
    "last taken out": take_out_last,
    "frozen newcomer": with_a_frozen_newcomer,
    "unused newcomer": with_an_unused_newcomer,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", HARMLESS)
@mixes
def test_changes_that_leave_every_gradient_where_it_was(mix: str, case: str) -> None:
    """The same as a network that was so from the start, by position."""
    torch.compiler.reset()
    results = []
    for changed_later in (True, False):
        if changed_later:
            model, optimizer = make(mix)
            HARMLESS[case](model)
        else:
            model = Net()
            last = model.blocks[2]
            HARMLESS[case](model)
            if case == "last taken out":  # it was in the optimizer, and counted for its buckets
                model.blocks.append(last)
            optimizer = adamw(model, max_grad_norm=0.5)
            if case == "last taken out":
                take_out_last(model)
        for step in range(3):
            one_step(model, optimizer, step)
        optimizer.wait()
        results.append({str(i): p.detach().clone() for i, p in enumerate(Net.parameters(model))})
    torch.compiler.reset()
    assert_equal(*results)


class Adapted(torch.nn.Module):
    """A linear layer and a trainable addition to it."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.addition = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.addition(x)
        return out


@mixes
def test_a_newcomer_with_a_gradient_that_nobody_steps(mix: str) -> None:
    model, optimizer = make(mix)
    one_step(model, optimizer)
    model.blocks[1].up = Adapted(model.blocks[1].up)  # type: ignore[assignment]
    optimizer.state_dict()  # looked at, and without a gradient so far
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"'blocks\.1\.up\.addition\.weight' has a gradient that nobody") as caught:
            optimizer.step()
    assert "add_param_group" in caught.value.fix
    assert_equal(before, snapshot(model, optimizer))
    named = [(n, p) for n, p in model.named_parameters() if "addition" in n]
    optimizer.add_param_group({"params": named})
    optimizer.step()
    assert optimizer.state_dict()["state"]["blocks.1.up.addition.weight"]["step"] == 1


def test_a_parameter_registered_at_the_end_is_a_newcomer() -> None:
    model, optimizer = make("mixed")
    model.head.gain = torch.nn.Parameter(torch.ones(1))
    model.head.gain.grad = torch.ones(1)
    backward(model)
    with pytest.raises(ModelError, match=r"'head\.gain' has a gradient that nobody steps"):
        optimizer.step()


def test_what_has_been_looked_at_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("mixed")
    model.blocks[1].act = torch.nn.Tanh()
    one_step(model, optimizer)
    with monkeypatch.context() as no_walk:
        no_walk.delattr(master_sync, "paths_of")
        one_step(model, optimizer)
    model.blocks[1].act.inside = torch.nn.Linear(3, 3)  # in what has been looked at
    model.blocks[1].act.inside.weight.grad = torch.ones(3, 3)
    with pytest.raises(ModelError, match=r"'blocks\.1\.act\.inside\.weight' has a gradient"):
        one_step(model, optimizer)


def test_weights_of_an_added_layer_may_be_loaded_again(caplog: pytest.LogCaptureFixture) -> None:
    """Equal bits: the master keeps what it has below them."""
    model, optimizer = make("mixed", torch.bfloat16)
    model.blocks.append(Block(32).bfloat16())
    optimizer.add_param_group({"params": [(n, p) for n, p in model.named_parameters() if n.startswith("blocks.3")]})
    one_step(model, optimizer)
    before = snapshot(model, optimizer)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    assert_equal(before, snapshot(model, optimizer))
    assert not caplog.records


@mixes
def test_layers_of_an_added_group_are_looked_at_as_well(mix: str) -> None:
    model, optimizer = make(mix)
    model.blocks.append(Block(32))
    optimizer.add_param_group({"params": [(n, p) for n, p in model.named_parameters() if n.startswith("blocks.3")]})
    one_step(model, optimizer)
    model.blocks[3].up = torch.nn.Linear(32, 32)
    with pytest.raises(ModelError, match=r"'blocks\.3\.up\.weight' was replaced"):
        one_step(model, optimizer)


def test_what_another_optimizer_trains_is_its_own_affair() -> None:
    model = Net()
    named = list(model.named_parameters())
    optimizer = adamw([x for x in named if "head" not in x[0]], module=model)
    other = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(2):
        one_step(model, optimizer, step)
        other.step()
        other.zero_grad()
        model.blocks[step].act = torch.nn.Tanh()
    model.head = torch.nn.Linear(32, 10).requires_grad_(False)
    one_step(model, optimizer)


@mixes
def test_what_was_frozen_is_not_trained_in_vain(mix: str) -> None:
    """The optimizer was given the module, whose trainable parameters were others then."""
    model = Net()
    model.blocks[1].requires_grad_(False)
    loss_of(model, 0).backward()
    optimizer = adamw(model, **MIXES[mix])
    one_step(model, optimizer)
    model.blocks[1].requires_grad_(True)
    before = snapshot(model, optimizer)
    with pytest.raises(ModelError, match=r"'blocks\.1\..*' has a gradient that nobody steps\n.*it was frozen"):
        one_step(model, optimizer)
    assert_equal(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(model.blocks[1].named_parameters("blocks.1"))})
    one_step(model, optimizer)
    assert not same_bits(snapshot(model, optimizer)["weight blocks.1.up.weight"], before["weight blocks.1.up.weight"])


def test_what_stays_frozen_may_have_an_old_gradient() -> None:
    model = Net()
    loss_of(model, 0).backward()
    model.blocks[1].requires_grad_(False)
    one_step(model, adamw(model))


def test_parameters_that_were_given_are_trained_from_when_they_are_not_frozen() -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    optimizer = adamw(list(model.named_parameters()))
    before = model.blocks[1].up.weight.detach().clone()
    for step in range(2):
        model.blocks[1].requires_grad_(step == 1)
        one_step(model, optimizer, step)
        optimizer.wait()
        assert same_bits(model.blocks[1].up.weight.detach(), before) is (step == 0)


def test_weights_parametrized_later_are_refused() -> None:
    model, optimizer = make("mixed")
    torch.nn.utils.parametrize.register_parametrization(model.head, "weight", torch.nn.Tanh(), unsafe=True)
    with pytest.raises(ModelError, match=r"'head\.weight' was taken out of the module that held it"):
        one_step(model, optimizer)


def test_the_look_calls_no_function_for_each_parameter() -> None:
    """It is taken before every step: what it costs is what C loops over dictionaries cost."""
    blocks = [[torch.nn.Linear(2, 2, bias=False) for _ in range(9)] for _ in range(112)]
    model = torch.nn.ModuleList(torch.nn.ModuleList(block) for block in blocks)
    look = adamw(model)._watch._structure
    assert len(list(model.parameters())) == 1008
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        look.require_same()
        look.require_no_newcomers()
    finally:
        sys.setprofile(None)
    assert len(calls) < 50
