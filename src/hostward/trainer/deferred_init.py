"""Build a model without memory, record the random operations that fill its weights, and run them later.

Run later in the recorded order, on whole tensors, they make weights bitwise identical to those of a model built with
memory; the caller keeps the part of each tensor that it wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hostward.config.schema import Config
from hostward.core.inventory import layer_of
from hostward.errors import ModelError
from hostward.model.layers import find_layers
from hostward.model.parameters import local_of
from hostward.plan.plan_file import PlanFile, layers_of
from hostward.trainer.models import empty_model, load_pretrained, meta_model, transformers_config
from hostward.trainer.process_group import Ranks

_DRAWS = {"uniform_", "normal_", "fill_", "zero_"}
_FACTORIES = {torch.empty, torch.ones, torch.zeros}


@dataclass(frozen=True, slots=True)
class Draw:
    """Operation that fills a tensor in place: its name, its arguments, and the index of the tensor."""

    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    tensor: int


@dataclass(slots=True)
class Draws:
    """Records draws in order, with their tensors."""

    made: list[Draw] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The tensors are kept alive, so that no two have the same id."""
    numbers: dict[int, int] = field(default_factory=dict)

    def note(self, name: str, tensor: torch.Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        number = self.numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        self.made.append(Draw(name, arguments, options, number))

    def carry_out(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        device: torch.device,
        keep: Callable[[str, torch.Tensor], None],
    ) -> None:
        """Run every draw on `device`, from torch's default generator there, one whole tensor at a time.

        Args:
            named: the parameters of the model as it was built, by name.
            keep: called with each name and whole tensor after its last draw.

        Raises:
            ModelError: a parameter without a draw.
        """
        names = {self.numbers[id(tensor)]: name for name, tensor in named if id(tensor) in self.numbers}
        missing = [name for name, tensor in named if id(tensor) not in self.numbers]
        if missing:
            raise ModelError(
                f"the initial value of weight {missing[0]!r} is unknown",
                why="a model that is built without memory, because ranks hold parts of it or layers are offloaded, is "
                "filled by the random operations of its class",
                fix="train it from a folder (model.hf_model_path), or with one process and all weights on the device",
            )
        last = {draw.tensor: i for i, draw in enumerate(self.made)}
        for i, draw in enumerate(self.made):
            like = self.tensors[draw.tensor]
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
            getattr(whole, draw.name)(*draw.arguments, **draw.options)
            if last[draw.tensor] == i and draw.tensor in names:
                keep(names[draw.tensor], whole)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records draws into tensors without memory."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _DRAWS and args[0].is_meta:
            options = {key: value for key, value in (kwargs or {}).items() if key != "generator"}
            self._draws.note(name, args[0], args[1:], options)
            return args[0]  # there is nothing to fill
        return func(*args, **(kwargs or {}))


class _WithoutMemory(TorchFunctionMode):
    """Makes parameters on the meta device, and only those.

    Buffers are computed, and classes that ask for the current device, to leave out draws if there is no memory, get the
    real one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _FACTORIES:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def recording_draws(device: torch.device) -> Iterator[Draws]:
    """Build a model for `device` inside the block without memory for its weights, and record draws into them."""
    draws = Draws()
    with device, _WithoutMemory(), _Noting(draws):
        yield draws


def without_memory(
    config: Config, vocab_size: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Draws | None]:
    """Build the model of `config.model` without memory and return it with the draws that fill it on `device`.

    The model of a pretrained folder is built on the CPU, without draws.
    """
    path, draws = config.model.hf_model_path, None
    if path is None:
        described = transformers_config(config.model, vocab_size=vocab_size)
        with recording_draws(device) as draws:
            model = empty_model(described, dtype)
    else:
        model = load_pretrained(config.model, path, dtype)
    model.config.use_cache = False
    return model, draws


def fill(
    models: Sequence[Any],
    draws: Draws,
    named: list[tuple[str, torch.Tensor]],
    device: torch.device,
    seed: int,
    *,
    memory: torch.device | None = None,
) -> None:
    """Allocate the parts of a model that are here and fill them by draws, leaving the caller's generators unchanged.

    Args:
        models: the models that are here.
        named: the parameters of the whole model.
        device: where weights are drawn, one at a time; memory: where they are kept, by default there too.
    """
    parameters: dict[str, torch.Tensor] = {}
    for model in models:
        model._apply(lambda tensor: torch.empty_like(tensor, device=memory or device) if tensor.is_meta else tensor)
        if model.config.tie_word_embeddings:
            model.tie_weights()
        parameters |= dict(model.named_parameters())

    @torch.no_grad()
    def keep(name: str, whole: torch.Tensor) -> None:
        if name in parameters:
            local_of(parameters[name]).copy_(_part_of(name, whole, parameters[name]))

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        draws.carry_out(named, device, keep)


def _part_of(name: str, whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter's value that this process has."""
    if local_of(parameter) is parameter:
        return whole
    from hostward.distributed import fsdp2

    return fsdp2.part_of_saved(name, whole, parameter)


# Models with offloaded weights: built on the CPU, so that the device never holds all of them, bitwise identical to
# weights drawn on the device.


@dataclass(frozen=True, slots=True)
class OffloadedWeights:
    """Names how many first layers here offload their weights, and this rank's bytes of them.

    With one process they are on the CPU until they are attached; weights of pipeline stages and of sharded layers are
    on the device until then.
    """

    layers: int
    weight_bytes: int


def weights_to_offload(
    config: Config, plan: PlanFile | None, vocab_size: int | None, dtype: torch.dtype, ranks: Ranks
) -> OffloadedWeights | None:
    """Return the weights that options or the plan offload; None if all weights stay on the device."""
    if plan is not None:
        count = layers_of(plan).weights
    else:
        leaves = config.model.cpu_offloading and config.model.cpu_offloading_weights
        count = config.model.cpu_offloading_num_layers if leaves else 0
    if not count:
        return None
    model = meta_model(config, vocab_size, dtype)
    paths, rounds = find_layers(model), config.model.virtual_pipeline_model_parallel_size or 1
    here = [path for i, (path, _) in enumerate(paths) if ranks.has_layer(i, len(paths), rounds)]
    names = set(here[:count])
    held = sum(math.prod(p.shape) for name, p in model.named_parameters() if layer_of(name) in names)
    parts = ranks.of_stage if ranks.divided else 1
    return OffloadedWeights(count, -(-held * dtype.itemsize // parts))


def build_on_cpu(
    config: Config, *, vocab_size: int | None, device: torch.device, dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """Build the model on the CPU for `hostward.move`, as `models.build_model`, but drawing each weight on `device`.

    Raises:
        ConfigError, ModelError: as there; a weight that is not drawn while the model is built.
    """
    model, draws = without_memory(config, vocab_size, device, dtype)
    if draws is not None:
        fill([model], draws, list(model.named_parameters()), device, seed, memory=torch.device("cpu"))
    trained: torch.nn.Module = model.train()
    return trained
