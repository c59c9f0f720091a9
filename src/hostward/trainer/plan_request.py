"""Separate what a recipe's options and those of `hostward plan` fix from what the planner chooses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from hostward.config.rules.table import DEPENDENT, other_kind, serial
from hostward.config.schema import Config, get_option, nearest
from hostward.config.validate import check
from hostward.core.inventory import Dtype, StateFormat
from hostward.core.placement import Placement, place_fraction
from hostward.core.units import MIB
from hostward.errors import ConfigError, NotBuiltError
from hostward.plan.cost_model import Costs, Speeds
from hostward.plan.decisions import ELEMENTWISE, ELEMENTWISE_MODULES, LEAVES, Choice, Keep
from hostward.plan.memory_model import RESUME, SAVE, TRAINING
from hostward.plan.search import best_share
from hostward.plan.solver import Forced
from hostward.plan.workload import Workload

T = TypeVar("T", Placement, Keep)

_OTHER_DIVISIONS = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.expert_model_parallel_size",
)


_FORCING = (
    "model.cpu_offloading",
    "model.recompute_granularity",
    "optimizer.optimizer_cpu_offload",
    "optimizer.offload_optimizer_states",
)


def forces(option: str) -> bool:
    """Return whether the option fixes a choice, as `asked_of` reads them, or depends on one that does."""
    return any(option in (switch, *DEPENDENT[switch]) for switch in _FORCING)


def asked_of(config: Config, workload: Workload, speeds: Speeds | None) -> Forced:
    """Return the choices that a recipe's options fix; the planner makes all others.

    `speeds` divide an "auto" mix.
    """
    forced, options = _besides_placements(config, workload), config.optimizer
    if not options.optimizer_cpu_offload and not options.offload_optimizer_states:
        return forced
    asked = shares(config)
    share = asked.streamed_fraction
    if isinstance(share, str):
        share = 0.0
        if speeds is not None and asked.offload_fraction:
            keeps = tuple(forced.activations.get(i, Keep.KEEP) for i in range(len(workload.repeated)))
            on_host = bool(forced.gradients_on_host)
            choice = Choice((), keeps, frozenset(), on_host, forced.staging_bytes, serial=serial(config))
            share = best_share(Costs(workload, speeds), choice, asked.offload_fraction)
    plan = place_fraction(workload.inventory.buckets, asked.offload_fraction, share)
    placements = {i: row.placement for i, row in enumerate(plan.buckets)}
    # Without a plan a run accumulates gradients on the host only if options ask for it.
    return replace(forced, placements=placements, gradients_on_host=bool(forced.gradients_on_host))


def _besides_placements(config: Config, workload: Workload) -> Forced:
    options, model = config.optimizer, config.model
    count = len(workload.repeated)
    leaving = model.cpu_offloading_num_layers if model.cpu_offloading and model.cpu_offloading_activations else 0
    keeps: dict[int, Keep] = {}
    if leaving or model.recompute_granularity is not None:
        keeps = {i: _keep(config, i, leaving) for i in range(count)}
    elif model.cuda_graph_impl != "none":
        keeps = dict.fromkeys(range(count), Keep.KEEP)
    weights = None
    if model.cpu_offloading and model.cpu_offloading_weights:
        weights = frozenset(layer.name for layer in workload.repeated[: model.cpu_offloading_num_layers])
    return Forced(
        activations=keeps,
        offloaded_weights=weights,
        gradients_on_host=None if options.gradients is None else options.gradients == "host",
        staging_bytes=options.optimizer_state_offload_chunk_size_mb * MIB or None,
    )


def other_division(config: Config) -> str | None:
    """Return the option that divides the model otherwise than plans know, by rows among all GPUs; None if none does."""
    return next((name for name in _OTHER_DIVISIONS if get_option(config, name) > 1), None)


def require_by_rows(config: Config, what: str, ranks: int) -> None:
    """Raise NotBuiltError if options divide the model otherwise than plans know.

    `what` names the caller that needs a plan, for that number of `ranks`.
    """
    if (name := other_division(config)) is not None:
        raise NotBuiltError(
            f"{what} with {name}={get_option(config, name)} is known, but not built yet",
            why="a plan divides each parameter by rows among all GPUs",
            fix=f"set {name}=1, or choose by options what is offloaded, without a plan",
        )
    if ranks > 1 and not config.ddp.use_distributed_optimizer:
        raise NotBuiltError(
            f"{what} for {ranks} GPUs with ddp.use_distributed_optimizer=false is known, but not built yet",
            why="a plan divides each parameter by rows among all GPUs, but with this option each GPU has all of them",
            fix="set ddp.use_distributed_optimizer=true",
        )


class Unplanned(NamedTuple):
    """Option with which layers save other tensors for backward than a plan's choices.

    `adds`: they save more than the memory estimate of runs with the option counts; else less.
    """

    option: str
    adds: bool = False


def unplanned(config: Config) -> Unplanned | None:
    """Return the first such option that is set."""
    model = config.model
    leave = model.cpu_offloading and model.cpu_offloading_activations and model.cpu_offloading_num_layers > 0
    if model.fine_grained_activation_offloading:
        return Unplanned("model.fine_grained_activation_offloading=true")
    if leave and model.cpu_offloading_double_buffering:
        return Unplanned("model.cpu_offloading_double_buffering=true", adds=True)
    if model.recompute_granularity == "selective" and set(model.recompute_modules) != _elementwise(config):
        return Unplanned(f"model.recompute_modules=[{','.join(model.recompute_modules)}]")
    return None


def _elementwise(config: Config) -> set[str]:
    """Return what plans recompute within layers, by the names of options."""
    grouped = config.model.experts_implementation != "eager"
    return {*ELEMENTWISE_MODULES} - other_kind(config) - (set() if grouped else {"moe_act"})


def require_planned(config: Config, what: str) -> None:
    """Raise NotBuiltError for options that a plan does not support.

    `what` names the caller that needs one.
    """
    if (found := unplanned(config)) is not None:
        raise NotBuiltError(
            f"{what} with {found.option} is known, but not built yet",
            why="a plan offloads whole layers' saved tensors, through one buffer, and recomputes whole layers, or "
            f"{' and '.join(sorted(_elementwise(config)))} within them",
            fix="leave the option out, and the plan chooses; or train without a plan: hostward train estimates the "
            "memory of such a run before it starts",
        )


def require_early(config: Config, share: float) -> None:
    """Raise ConfigError if nothing could be stepped during backward with these options, where a plan offloads state."""
    if not share:
        return
    offloading = copy.deepcopy(config)
    options = offloading.optimizer
    options.step_early, options.optimizer_cpu_offload = share, True
    options.optimizer_offload_fraction = options.optimizer_offload_fraction or 1.0
    check(offloading)


def unplanned_graphs(what: str) -> NotBuiltError:
    """Return the error for `what`, which needs a plan, with forward and backward in a CUDA graph."""
    return NotBuiltError(
        f"{what} with model.cuda_graph_impl=full_iteration is known, but not built yet",
        why="a plan counts on memory that backward frees, and on a step that overlaps with forward and backward",
        fix="set model.cuda_graph_impl=none, or choose by options what is offloaded: hostward train estimates the "
        "memory of such a run before it starts",
    )


def phases_of(config: Config) -> tuple[str, ...]:
    """Return the phases of a run with these options, all of which must fit."""
    saves = (SAVE,) if config.checkpoint.save is not None else ()
    resumes = (RESUME,) if config.checkpoint.load is not None else ()
    return (*TRAINING, *saves, *resumes)


def _keep(config: Config, layer: int, leaving: int) -> Keep:
    model = config.model
    first = model.recompute_num_layers or 0
    whole = model.recompute_granularity == "full" and (model.recompute_method == "uniform" or layer < first)
    # A layer that is recomputed as a whole saves no more than if only its activation were.
    again = {f"{name}_act" if name in ("mlp", "moe") else name for name in model.recompute_modules}
    parts = model.recompute_granularity == "selective" and again >= _elementwise(config)
    if layer < leaving:
        return Keep.RECOMPUTE_OFFLOAD if whole else Keep.ELEMENTWISE_OFFLOAD if parts else Keep.OFFLOAD
    return Keep.RECOMPUTE if whole else Keep.ELEMENTWISE if parts else Keep.KEEP


@dataclass(frozen=True, slots=True)
class ByHand:
    """Choices made by hand: `--place PATTERN=PLACEMENT`, `--keep PATTERN=WHAT` and `--weights N`.

    Patterns match layer or bucket names, as in shells; `--weights` offloads the weights of the first N layers.
    """

    places: tuple[tuple[str, Placement], ...]
    keeps: tuple[tuple[str, Keep], ...]
    weights: int | None


def by_hand(places: Sequence[str], keeps: Sequence[str], weights: int | None, layers: int | None) -> ByHand:
    """Parse these options before there is a model.

    Args:
        layers: number of the model's layers, if known already.

    Raises:
        ConfigError: a text without a pattern, an unknown word, or more layers than the model has.
    """
    if layers is not None:
        _require_fewer(weights, layers)
    return ByHand(_words("--place", places, Placement), _words("--keep", keeps, Keep), weights)


def forced_by_hand(workload: Workload, before: Forced, hand: ByHand) -> Forced:
    """Return `before` with the changes made by hand.

    Raises ConfigError for a pattern that nothing matches, too many layers, weights on the host of a layer whose step is
    elsewhere, or parts of a layer to be recomputed that it does not have.
    """
    placements, activations = dict(before.placements), dict(before.activations)
    buckets = [(bucket.layer, bucket.name) for bucket in workload.inventory.buckets]
    layers = [(layer.name,) for layer in workload.repeated]
    placements |= _matched("--place", hand.places, buckets)
    kept = _matched("--keep", hand.keeps, layers)
    _require_parts(workload, kept)
    activations |= kept
    chosen = before.offloaded_weights
    if hand.weights is not None:
        _require_fewer(hand.weights, len(layers))
        chosen = frozenset(layer.name for layer in workload.repeated[: hand.weights])
    if hand != ByHand((), (), None):
        _require_stepped_there(workload, placements, chosen or frozenset())
    return replace(before, placements=placements, activations=activations, offloaded_weights=chosen)


def _require_parts(workload: Workload, kept: Mapping[int, Keep]) -> None:
    """Raise ConfigError if layer norms and activations are to be recomputed of a layer that has none to recompute."""
    for index, keep in kept.items():
        layer = workload.repeated[index]
        if keep in ELEMENTWISE and not any(part.elementwise for part in layer.saved):
            whole = Keep.OFFLOAD if keep in LEAVES else Keep.RECOMPUTE
            raise ConfigError(
                f"--keep {layer.name}={keep.value}: there is nothing of it to recompute",
                why="no layer norm or activation of this model is known to be recomputed by itself",
                fix=f"--keep '{layer.name}={whole.value}'",
            )


def _require_stepped_there(workload: Workload, placements: Mapping[int, Placement], away: frozenset[str]) -> None:
    """Raise ConfigError if the optimizer state of a layer in `away` is not placed where the CPU steps it."""
    buckets = workload.inventory.buckets
    for index, placement in placements.items():
        if (layer := buckets[index].layer) in away and placement is not Placement.HOST:
            raise ConfigError(
                f"the weights of {layer} are to be on the host, and its optimizer state on the "
                f"{'host, to be streamed' if placement is Placement.STREAMED else 'device'}",
                why="a trained weight on the host is written there, by the CPU optimizer step",
                fix=f"offload fewer layers' weights, or --place '{layer}=host' for each such layer",
            )


def _require_fewer(weights: int | None, layers: int) -> None:
    if weights and weights >= layers:
        raise ConfigError(
            f"--weights {weights}: the model has {layers} layers",
            why="the weights of the last layer are used by forward and then at once by backward, so they stay",
            fix=f"at most --weights {layers - 1}",
        )


def _words(option: str, texts: Sequence[str], cls: type[T]) -> tuple[tuple[str, T], ...]:
    found: list[tuple[str, T]] = []
    known = [member.value for member in cls]
    for text in texts:
        pattern, separator, word = text.rpartition("=")
        if not separator:
            raise ConfigError(
                f"{option} {text} is not of the form PATTERN=WHAT",
                why=f"WHAT is one of {', '.join(known)}",
                fix=f"{option} 'model.layers.0={known[0]}'",
            )
        if word not in known:
            closest = nearest(word, known)
            raise ConfigError(
                f"{option} {text}: {word!r} is not a known word after =",
                why=f"they are {', '.join(known)}",
                fix=f"did you mean {closest}?" if closest else f"{option} '{pattern or '*'}={known[0]}'",
            )
        found.append((pattern, cls(word)))
    return tuple(found)


def _matched(option: str, asked: Sequence[tuple[str, T]], names: Sequence[tuple[str, ...]]) -> Mapping[int, T]:
    found: dict[int, T] = {}
    for pattern, word in asked:
        hit = [i for i, held in enumerate(names) if any(fnmatchcase(name, pattern) for name in held)]
        if not hit:
            raise ConfigError(
                f"{option} {pattern}={word.value}: no name matches {pattern}",
                why=f"names are like {names[0][0]}" if names else "",
                fix=f"{option} '*={word.value}' matches all",
            )
        found |= dict.fromkeys(hit, word)
    return found


# Shares of the optimizer's state by placement, as options ask. No torch.


@dataclass(frozen=True, slots=True)
class Shares:
    """Gives the share of state that `hostward.AdamW` places off the device, and the streamed part of it."""

    offload_fraction: float
    streamed_fraction: float | str

    @property
    def host_share(self) -> tuple[float, float]:
        """Return the least and most share of all state with a CPU optimizer step, since measured rates may decide."""
        if isinstance(self.streamed_fraction, str):
            return 0.0, self.offload_fraction
        share = self.offload_fraction * (1 - self.streamed_fraction)
        return share, share


def state_format(config: Config) -> StateFormat:
    """Return how the optimizer stores state, by the options."""
    options = config.optimizer
    return StateFormat(
        Dtype(options.exp_avg_dtype),
        Dtype(options.exp_avg_sq_dtype),
        Dtype(options.main_params_dtype),
        split_master=not options.use_torch_optimizer_for_cpu_offload,
    )


def shares(config: Config) -> Shares:
    """Return the shares that the options ask for.

    Of all state optimizer_offload_fraction has a CPU optimizer step; of the rest optimizer_state_offload_fraction is
    streamed. `offload_mix` streams a part of the first instead.
    """
    options = config.optimizer
    on_host = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    if options.offload_mix is not None:
        return Shares(
            on_host, options.offload_mix if isinstance(options.offload_mix, str) else float(options.offload_mix)
        )
    streamed = (1 - on_host) * options.optimizer_state_offload_fraction if options.offload_optimizer_states else 0.0
    total = min(1.0, on_host + streamed)
    return Shares(total, min(1.0, streamed / total) if total else 0.0)
