"""Find what a module holds and computes, as a workload, on the meta device. No weight is allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from hostward.activations.recompute import Region, Regions, elementwise_in
from hostward.core.inventory import FP32_STATE, Dtype, Inventory, StateFormat, cut_buckets, layer_of
from hostward.errors import ConfigError, ModelError
from hostward.model.layers import find_layers
from hostward.model.parameters import ParamRegistry, groups_of
from hostward.plan.workload import Curve, Layer, Moment, PerToken, Saved, Way, Workload
from hostward.profiler.layer_profiler import Layers, Loss, PartRun, run
from hostward.profiler.meta_tape import Made
from hostward.runtime.backend import DTYPES

_NOTHING = PerToken(0.0)


def workload_of(model: torch.nn.Module, *, sequence_tokens: int, loss: Loss, **options: Any) -> Workload:
    """Profile one step of training a causal language model, with sequences of this length.

    Options, raises as `workloads_of`.
    """
    return workloads_of(model, lengths=(sequence_tokens,), loss=loss, **options)[0]


def workloads_of(
    model: torch.nn.Module,
    *,
    lengths: Sequence[int],
    loss: Loss,
    microbatch_sequences: int = 1,
    microbatches: int = 1,
    name: str = "",
    layers: Sequence[torch.nn.Module] | None = None,
    form: StateFormat = FP32_STATE,
) -> list[Workload]:
    """Profile one step of training a causal language model, for each of these sequence lengths.

    One forward and backward run on the meta device at three sizes for a length, over as many layers as there are kinds
    of them, twice. `model` is not changed, and may be on the meta device itself. A length that is twice another one has
    a size in common with it, which is run once.

    Args:
        loss: the loss of training, of token numbers int64 [sequences, tokens].
        name: the model's name; by default its class.
        layers: the layers in order of use, where they cannot be found.
        form: how the optimizer stores state.

    Raises:
        ModelError: no layers were found; forward depends on values of tensors; or the model is sharded.
        ConfigError: sizes below 1.
    """
    for option, value in (("sequence_tokens", min(lengths)), ("microbatch_sequences", microbatch_sequences)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}")
    if groups_of(model) is not None:
        raise ModelError(
            "the model is sharded by FSDP2",
            why="forward and backward run on the meta device here, where there are no ranks to gather from",
            fix="plan with the model as it is before fully_shard",
        )
    found = find_layers(model, layers)
    traced = _Traced(model, found, loss)
    inventory = inventory_of(model, form)
    return [
        Workload(
            name or type(model).__name__,
            inventory,
            tuple(_in_order(model, found, traced.parts(Size(microbatch_sequences, length)))),
            _weight_dtype(model),
            length,
            microbatch_sequences,
            microbatches,
        )
        for length in lengths
    ]


def inventory_of(model: torch.nn.Module, form: StateFormat = FP32_STATE) -> Inventory:
    """Return the trainable parameters and the buckets that hostward.AdamW cuts them into."""
    places = ParamRegistry(model)
    facts = tuple(places.tracked(name, p, 0).facts for name, p in places.trainable())
    return Inventory(facts, cut_buckets(facts, form=form))


def _weight_dtype(model: torch.nn.Module) -> Dtype:
    numels: dict[torch.dtype, int] = {}
    for p in model.parameters():
        numels[p.dtype] = numels.get(p.dtype, 0) + p.numel()
    dtype = max(numels, key=lambda d: numels[d])
    if dtype not in DTYPES:
        raise ModelError(f"weights of dtype {dtype}", fix="train in float32, bfloat16 or float16")
    return DTYPES[dtype]


# ---------------------------------------------------------------- runs


class _Traced:
    """Run a short model that has each kind of layer twice."""

    def __init__(self, model: torch.nn.Module, layers: Layers, loss: Loss) -> None:
        self._model, self._layers, self._loss = model, layers, loss
        self._size = Size(1, 1)
        self._run_at: dict[tuple[Way, Size], list[PartRun]] = {}
        self._made: Made = {}
        kinds = _kinds(model, layers)
        first = [[i for i, kind in enumerate(kinds) if kind == known] for known in dict.fromkeys(kinds)]
        self._few = sorted(i for held in first for i in held[:2])
        self._more = {held[2]: len(held) - 2 for held in first if len(held) > 2}
        """One layer more of each kind that has one, and how many there are of it besides the two."""
        representative = {kinds[held[0]]: held[:2][-1] for held in first}
        self._stands_for = [self._few.index(representative[kind]) for kind in kinds]
        self._short = _short(model, layers, self._few)

    def parts(self, size: Size) -> list[Layer]:
        """Return the layers and the parts before and after them, without weights, at this size."""
        self._size, self._fit = size, TokenFit(size)
        runs = {way: found for way in Way if (found := self._runs(way)) is not None}
        made = {few: self._layer(few, runs) for few in dict.fromkeys(self._stands_for)}
        named = []
        for few, (path, _) in zip(self._stands_for, self._layers, strict=True):
            layer = made[few]
            named.append(replace(layer, name=path, gradients=tuple(_renamed(layer.gradients, layer.name, path))))
        before, behind = self._ends(runs[Way.KEEP])
        return [before, *named, behind]

    def _runs(self, way: Way) -> list[list[PartRun]] | None:
        """Run the model at each size; None if no layer can run that way."""
        model, layers = self._short
        with _running(layers, way) as possible:
            if not possible:
                return None
            try:
                for size in sizes(self._size):
                    if (way, size) not in self._run_at:
                        self._run_at[way, size] = run(model, layers, _ids(size), self._loss, self._made)
                return [self._run_at[way, size] for size in sizes(self._size)]
            except ModelError:
                if way is Way.ELEMENTWISE:
                    return None  # its modules are not what their names promise, and training cannot recompute them
                raise

    def _layer(self, few: int, runs: Mapping[Way, list[list[PartRun]]]) -> Layer:
        found = {way: [parts[few + 1] for parts in by_size] for way, by_size in runs.items()}
        curves = {way: curve(self._fit, parts) for way, parts in found.items()}
        path = self._short[1][few][0]
        return _layer_of(path, self._fit, found[Way.KEEP], curves, found.get(Way.ELEMENTWISE))

    def _ends(self, keep: list[list[PartRun]]) -> list[Layer]:
        """Return the parts before and after the layers."""
        more = []
        for one, count in self._more.items():
            model, layers = _short(self._model, self._layers, sorted([*self._few, one]))
            more.append((run(model, layers, _ids(self._size), self._loss, self._made), count))
        found = []
        for part in (0, -1):
            runs = [parts[part] for parts in keep]
            held = curve(self._fit, runs)
            for longer, count in more:
                held = with_layers(self._fit, held, runs[0], longer[part], count)
            layer = _layer_of("", self._fit, runs, dict.fromkeys(Way, held), None)
            found.append(replace(layer, repeated=False))
        return found


def _renamed(names: Sequence[str], before: str, after: str) -> Iterator[str]:
    for name in names:
        yield f"{after}{name.removeprefix(before)}" if name.startswith(f"{before}.") else name


def _ids(size: Size) -> torch.Tensor:
    return torch.empty(size.sequences, size.tokens, dtype=torch.int64, device="meta")


@contextmanager
def _running(layers: Layers, way: Way) -> Iterator[bool]:
    """Make layers run this way within the context; yields False if none of them can."""
    regions: list[Region | Regions] = []
    if way is Way.RECOMPUTE:
        regions += [Region(layer) for _, layer in layers]
    elif way is Way.ELEMENTWISE and (names := elementwise_in(layers)):
        regions.append(Regions(layers, names))
    try:
        yield way is Way.KEEP or bool(regions)
    finally:
        for region in regions:
            region.undo()


def _kinds(model: torch.nn.Module, layers: Layers) -> list[object]:
    """Return for each layer a value that equal layers share."""
    lists = [held for config in _configs(model, layers) for held in _by_layer(config, len(layers)).values()]
    return [(_kind(layer), tuple(repr(held[i]) for held in lists)) for i, (_, layer) in enumerate(layers)]


def _kind(layer: torch.nn.Module) -> object:
    modules = tuple((path, type(module), _settings(module)) for path, module in layer.named_modules())
    weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, weights


def _settings(module: torch.nn.Module) -> object:
    """Return what forward may branch on: words, flags and what is None. Numbers also count layers, and are left out."""
    public = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return tuple((name, value if isinstance(value, (str, bool)) else value is None) for name, value in public)


def _configs(model: torch.nn.Module, layers: Layers) -> list[Any]:
    """Return the configurations, each once, that the layers have, and the modules around the list of them."""
    parents = layers[0][0].split(".")[:-1]
    around = [model.get_submodule(".".join(parents[:depth])) for depth in range(len(parents) + 1)]
    held = (getattr(m, "config", None) for m in (*around, *(m for _, layer in layers for m in layer.modules())))
    return list({id(config): config for config in held if hasattr(config, "__dict__")}.values())


def _by_layer(config: Any, count: int) -> dict[str, Sequence[Any]]:
    """Return the lists of a configuration that say something of each layer, such as how it attends."""
    return {name: held for name, held in vars(config).items() if isinstance(held, (list, tuple)) and len(held) == count}


def _short(model: torch.nn.Module, layers: Layers, chosen: Sequence[int]) -> tuple[torch.nn.Module, Layers]:
    """Copy the model to the meta device, in training mode, with these layers only."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        like = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            torch.nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else like
        )
    paths = [path for path, _ in layers]
    if len(chosen) < len(layers):
        parent, _, _ = paths[0].rpartition(".")
        held = model.get_submodule(parent)
        if not isinstance(held, (torch.nn.ModuleList, torch.nn.Sequential)) or len(held) != len(layers):
            raise ModelError("the layers are not in one list", fix="leave layers= out")
        memo[id(held)] = type(held)(*_unpacked(held, [copy.deepcopy(layers[i][1], memo) for i in chosen]))
        paths = [f"{parent}.{i}" if parent else str(i) for i in range(len(chosen))]
    short = copy.deepcopy(model, memo).train()
    for module in short.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    found = [(path, short.get_submodule(path)) for path in paths]
    for config in _configs(short, found):
        of_layers = _by_layer(config, len(layers))
        # Written past the configuration's own checks, which may compare one length with the other in between.
        vars(config).update({name: [held[i] for i in chosen] for name, held in of_layers.items()})
        if vars(config).get("num_hidden_layers") == len(layers):
            vars(config)["num_hidden_layers"] = len(chosen)
    return short, found


def _unpacked(held: torch.nn.Module, layers: list[torch.nn.Module]) -> list[Any]:
    return layers if isinstance(held, torch.nn.Sequential) else [layers]


# ---------------------------------------------------------------- layers


def _layer_of(
    path: str,
    fit: TokenFit,
    runs: Sequence[PartRun],
    curves: Mapping[Way, Curve],
    elementwise: Sequence[PartRun] | None,
) -> Layer:
    """Build a layer without weights from its runs at the three sizes."""

    def rates(value: Callable[[PartRun], float]) -> PerToken:
        return fit.rates([value(r) for r in runs])

    saved = tuple(_saved(fit, runs, elementwise))
    kept = sum((part.bytes for part in saved), _NOTHING)
    tokens, length = fit.size.of_all, fit.size.tokens
    most = max((m.bytes for m in curves[Way.KEEP].backward), key=lambda rate: rate.of(tokens, length), default=_NOTHING)
    workspace = PerToken(most.linear - kept.linear, most.square - kept.square)
    return Layer(
        path,
        True,
        0,
        0,
        rates(lambda r: r.input_bytes),
        saved,
        rates(lambda r: sum(work.flops for work in r.work.values())),
        rates(lambda r: sum(work.traffic_bytes for work in r.work.values())),
        workspace if workspace.of(tokens, length) > 0 else _NOTHING,
        curves,
        runs[0].gradients,
        runs[0].saves_input,
    )


def _saved(fit: TokenFit, runs: Sequence[PartRun], elementwise: Sequence[PartRun] | None) -> Iterator[Saved]:
    """Split saved bytes into those that remain with elementwise recomputation and those recomputed."""
    whole = _by_name(runs)
    rest = whole if elementwise is None else _moved(whole, _by_name(elementwise))
    for name, held in whole.items():
        left = rest.get(name, [0] * len(held))
        flops = fit.rates([r.work[name].flops if name in r.work else 0.0 for r in runs])
        traffic = fit.rates([r.work[name].traffic_bytes if name in r.work else 0.0 for r in runs])
        again = [a - b for a, b in zip(held, left, strict=True)]
        if any(left):
            yield Saved(name, fit.rates(left), False, flops, _NOTHING if any(again) else traffic)
        if any(again):
            yield Saved(name, fit.rates(again), True, _NOTHING, traffic)


def _by_name(runs: Sequence[PartRun]) -> dict[str, list[int]]:
    """Return saved bytes by name and size."""
    return {name: [r.saved.get(name, 0) for r in runs] for name in dict.fromkeys(n for r in runs for n in r.saved)}


def _moved(whole: Mapping[str, list[int]], rest: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return `rest` with bytes that one part saves for others moved under the names of these.

    No name has more bytes than in `whole`.
    """
    sizes_of = range(len(next(iter(whole.values()), ())))
    more = [sum(max(0, left[i] - whole.get(name, left)[i]) for name, left in rest.items()) for i in sizes_of]
    more = [n + sum(left[i] for name, left in rest.items() if name not in whole) for i, n in enumerate(more)]
    found = {
        name: [min(left[i], held[i]) for i in sizes_of] for name, held in whole.items() if (left := rest.get(name))
    }
    for name, held in reversed(list(whole.items())):
        left = found.setdefault(name, [0] * len(held))
        for i in sizes_of:
            taken = min(more[i], held[i] - left[i])
            left[i] += taken
            more[i] -= taken
    return found


def _in_order(model: torch.nn.Module, layers: Layers, parts: Sequence[Layer]) -> Iterator[Layer]:
    """Return the parts with their weights, those outside of the layers by name, in order of the module."""
    inside = {path for path, _ in layers}
    trained: dict[str, int] = dict.fromkeys(inside, 0)
    frozen: dict[str, int] = dict.fromkeys(inside, 0)
    before: dict[str, None] = {}
    after: dict[str, None] = {}
    for name, p in model.named_parameters():
        held = next((path for path in inside if name.startswith(f"{path}.")), None) or layer_of(name)
        if held not in inside:
            (after if before and any(trained[path] + frozen[path] for path in inside) else before)[held] = None
        counted = trained if p.requires_grad else frozen
        counted[held] = counted.get(held, 0) + p.numel() * p.element_size()

    def weighed(layer: Layer, name: str) -> Layer:
        return replace(
            layer, name=name, trained_weight_bytes=trained.get(name, 0), frozen_weight_bytes=frozen.get(name, 0)
        )

    first, *middle, last = parts
    names = [*before] or ["inputs"]
    yield weighed(first, names[0])
    yield from (weighed(_EMPTY, name) for name in names[1:])
    yield from (weighed(layer, layer.name) for layer in middle)
    names = [*after] or ["outputs"]
    yield from (weighed(_EMPTY, name) for name in names[:-1])
    yield weighed(last, names[-1])


_EMPTY = Layer("", False, 0, 0, _NOTHING, (), _NOTHING, _NOTHING, _NOTHING)


# Fits runs at three sizes to functions of the number of tokens and the length of sequences.


@dataclass(frozen=True, slots=True)
class Size:
    """Hold the size of one microbatch."""

    sequences: int
    tokens: int
    """Tokens per sequence."""

    @property
    def of_all(self) -> int:
        return self.sequences * self.tokens


def sizes(size: Size) -> tuple[Size, Size, Size]:
    """Return the sizes for `TokenFit`: the planned one, twice as many sequences, sequences twice as long."""
    return size, Size(2 * size.sequences, size.tokens), Size(size.sequences, 2 * size.tokens)


@dataclass(frozen=True, slots=True)
class TokenFit:
    """Fit c + a * tokens + b * tokens * sequence_tokens through values at `sizes`, exactly."""

    size: Size

    def __call__(self, values: Sequence[float]) -> tuple[float, PerToken]:
        """Return the constant, and rates for each token."""
        one, more, longer = values
        if one == more:  # for one sequence, as tables of positions are
            return one, PerToken(0.0)
        size = self.size
        square = (longer - more) / (2 * size.of_all * size.tokens)
        linear = (more - one) / size.of_all - square * size.tokens
        return 2 * one - more, PerToken(linear, square)

    def rates(self, values: Sequence[float]) -> PerToken:
        """Return rates of a quantity without a constant; what there is of one counts with the tokens."""
        constant, rates = self(values)
        return rates + PerToken(constant / self.size.of_all)

    def moment(self, values: Sequence[float], gradients: int = 0) -> Moment:
        constant, rates = self(values)
        return Moment(rates, constant, gradients)


def curve(fit: TokenFit, runs: Sequence[PartRun]) -> Curve:
    """Fit the curve of one part from its runs at the three sizes."""
    one = runs[0]
    forward = _moments(fit, [r.forward for r in runs], [0] * len(one.forward))
    backward = _moments(fit, [r.backward for r in runs], one.made)
    return Curve(forward, fit.moment([r.kept_bytes for r in runs]), backward)


def with_layers(fit: TokenFit, found: Curve, run: PartRun, more: PartRun, times: int) -> Curve:
    """Extend the curve of a part that holds something for every layer, such as the choices of all routers.

    `run` is the part with a few layers and `more` with one more; the difference is added `times` times.
    """

    def later(moments: Iterable[Moment], before: Sequence[int], after: Sequence[int]) -> tuple[Moment, ...]:
        rate = PerToken(times * (max(after, default=0) - max(before, default=0)) / fit.size.of_all)
        return tuple(Moment(m.bytes + rate, m.fixed_bytes, m.gradients) for m in moments)

    forward = later(found.forward, run.forward, more.forward)
    return Curve(forward, found.kept, later(found.backward, run.backward, more.backward))


def _moments(fit: TokenFit, values: Sequence[Sequence[int]], made: Sequence[int]) -> tuple[Moment, ...]:
    if len({len(v) for v in values}) > 1:
        # In loops that depend on the number of tokens, such as a chunked loss, only the peaks can be compared.
        peaks = [max(v, default=0) for v in values]
        at = values[0].index(peaks[0])
        return (fit.moment(peaks, made[at]),)
    moments = [fit.moment(at, count) for at, count in zip(zip(*values, strict=True), made, strict=True)]
    return tuple(_most(moments))


def _most(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments that no other one exceeds in all regards."""
    found: list[Moment] = []
    for m in sorted(moments, key=_regards, reverse=True):
        if not any(all(a >= b for a, b in zip(_regards(kept), _regards(m), strict=True)) for kept in found):
            found.append(m)
    order = {id(m): i for i, m in enumerate(moments)}
    return sorted(found, key=lambda m: order[id(m)])


def _regards(moment: Moment) -> tuple[float, ...]:
    return moment.bytes.square, moment.bytes.linear, moment.fixed_bytes, moment.gradients
