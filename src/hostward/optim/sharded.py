"""Support parameters sharded by FSDP2: the shards stored here, and the work when FSDP2 gathers and reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hostward.distributed.flat_shards import FlatPart, FlatShards
from hostward.errors import ConfigError, ModelError
from hostward.model.parameters import ParamRecord, ParamRegistry, local_of
from hostward.optim.bucket_lifecycle import Kinds
from hostward.optim.bucket_state import BucketState
from hostward.optim.gradient_hooks import GradientHooks
from hostward.optim.step_executor import StepExecutor
from hostward.runtime.backend import CHUNK_ELEMENTS, Backend, Buffer, Tier, chunks_of
from hostward.runtime.global_norm import Across, Fragment, GroupRanks, Ranks, ShardRanks

if TYPE_CHECKING:
    from hostward.distributed import fsdp2


def require_sharding(places: ParamRegistry, tracked: Sequence[ParamRecord]) -> None:
    """Require that FSDP2 shards all parameters in a supported way, or none.

    Raises ModelError or ConfigError otherwise.
    """
    if places.sharding is None:
        for t in tracked:
            if t.sharded:
                raise ModelError(
                    f"parameter {t.name!r} is a {type(t.parameter).__name__} of no known FSDP2 module",
                    why="its gradient leaves when FSDP2 has reduced it, and its weight arrives before it is gathered",
                    fix="fully_shard the model first; give the optimizer the model, or module=model beside groups",
                )
        return
    places.sharding.require_supported({t.name: t.parameter for t in tracked})


def accumulate_in(
    dtype: torch.dtype,
    places: ParamRegistry,
    tracked: Sequence[ParamRecord],
    states: Sequence[BucketState],
    summed: Set[int],
    *,
    sums_on_host: bool,
) -> frozenset[str]:
    """Accumulate gradients in `dtype` in `.grad`, except those of the buckets `summed`.

    The host accumulates those in float32 as they are offloaded: they keep the dtype of their parameters, which is fewer
    bytes. Autograd adds up in that dtype what one backward pass contributes, of a model that was called several times;
    with `sums_on_host` that is so on the device, too. Not so where a parameter is used in several places: buckets with
    such a parameter are accumulated and offloaded in `dtype`.

    Returns the names of parameters whose gradient autograd leaves in their own dtype, to be cast after each pass.
    """
    of = {t.name: t.parameter for t in tracked}
    buckets = [{id(of[r.name]) for r in s.bucket.ranges} for s in states]
    on_host = [buckets[b] for b in summed]
    if places.sharding is not None:  # which adds up in the dtype of the gathered weights
        places.sharding.accumulate_in(dtype, _left_as_they_are(places.sharding, on_host))
        return frozenset()
    tied = {id(t.parameter) for t in tracked if places.is_tied(t.parameter)}
    once = _used_once(buckets if sums_on_host else [], tied)
    kept = set().union(*on_host)
    cast = []
    for t in tracked:
        if id(t.parameter) not in once:
            t.parameter.grad_dtype = dtype
        elif id(t.parameter) not in kept and t.parameter.dtype is not dtype:
            t.parameter.grad_dtype = None  # else autograd casts before it adds
            cast.append(t.name)
    return frozenset(cast)


def _used_once(buckets: Sequence[Set[int]], tied: Set[int]) -> set[int]:
    """Return the parameters of these buckets, without those of buckets with a tied one, and of buckets with one of
    these: a bucket's gradients are offloaded in one dtype.
    """
    wide, kept = set(tied), list(buckets)
    while any(not bucket.isdisjoint(wide) for bucket in kept):
        wide = wide.union(*(bucket for bucket in kept if not bucket.isdisjoint(wide)))
        kept = [bucket for bucket in kept if bucket.isdisjoint(wide)]
    return set().union(*kept)


def _left_as_they_are(sharding: fsdp2.Groups, buckets: Sequence[Set[int]]) -> Set[int]:
    """Return the parameters of FSDP2 groups whose gradients can keep their dtype.

    These groups have all of their parameters in these buckets, which share none with another group: FSDP2 knows one
    dtype for a group, and a bucket's gradients are offloaded in one.
    """
    here = set().union(*buckets)
    groups = [
        parts
        for parts in sharding.reduced_as_they_are()
        if all(id(p) in here or not p.requires_grad or not local_of(p).numel() for p in parts)
    ]
    while True:
        found = {id(p) for parts in groups for p in parts}
        elsewhere = set().union(*(bucket for bucket in buckets if not bucket <= found))
        kept = [parts for parts in groups if not any(id(p) in elsewhere for p in parts)]
        if len(kept) == len(groups):
            return found
        groups = kept


def made_together(groups: fsdp2.Groups | None, tracked: Sequence[ParamRecord]) -> list[list[str]]:
    """Return the parameter names of each FSDP2 group: its reduced gradients are stored in one memory."""
    names = {id(t.parameter): t.name for t in tracked}
    own = [] if groups is None else [parameters for parameters, _ in groups.gathered_together()]
    return [[names[id(p)] for p in parameters if id(p) in names] for parameters in own]


def ranks_of(tracked: Sequence[ParamRecord]) -> GroupRanks | None:
    """Return the ranks that have parts of these parameters; None where this process has all."""
    if not tracked[0].sharded:
        return None
    from hostward.distributed import fsdp2

    return GroupRanks(fsdp2.mesh_groups(tracked[0].parameter))


def checked_shards(
    shards: object, stages: dist.ProcessGroup | None, plan: object
) -> tuple[tuple[FlatShards, ...], dict[str, FlatPart], dist.ProcessGroup | None]:
    """Return flat shards, all their parts, and the processes over which the norm is. Raises ConfigError."""
    given = tuple(shards) if isinstance(shards, (list, tuple)) else (shards,)
    for each in given:
        if not isinstance(each, FlatShards):
            raise ConfigError(f"shards={shards!r}", fix="shards=hostward.FlatShards(parts, group)")
    if given and plan is not None:
        raise ConfigError(
            "plan=... with shards=...",
            why="a plan divides parameters by rows, and flat shards end anywhere",
            fix="leave plan out, and say offload_fraction",
        )
    for one, other in combinations(given, 2):
        for name in sorted(one.parts.keys() & other.parts.keys()):
            raise ConfigError(f"parameter {name!r} is in two of shards=...", fix="give each name one part")
    parts = {name: part for each in given for name, part in each.parts.items()}
    groups = list({id(each.group): each.group for each in given if each.group is not None}.values())
    if stages is None:
        if len(groups) > 1:
            raise ConfigError(
                "shards=... of several groups of processes, without stages=...",
                why="the norm is over all of them",
                fix="stages=the group of all these processes",
            )
        return given, parts, groups[0] if groups else None
    reached = set(dist.get_process_group_ranks(stages))
    for group in groups:
        missing = sorted(set(dist.get_process_group_ranks(group)) - reached)
        if missing:
            raise ConfigError(
                f"rank {missing[0]} has parts of shards=..., and is not one of stages=...",
                why="the norm is over all processes of stages, and would lack its gradients",
                fix="stages=the group of all processes that have parts",
            )
    return given, parts, stages


def require_parts(shards: Sequence[FlatShards], tracked: Sequence[ParamRecord]) -> None:
    """Raise ModelError unless each flat part is that of a parameter, which has as many elements."""
    of = {t.name: t for t in tracked}
    dtensor = next((t.name for t in tracked if t.sharded), None)
    if shards and dtensor is not None:
        raise ModelError(
            f"parameter {dtensor!r} is a DTensor, and others are in shards=...",
            why="how chunks of the norm are shared comes from FSDP2 or from shards, for all parameters",
            fix="make an optimizer for each kind of parameters, or leave shards out",
        )
    for name, part in (item for each in shards for item in each.parts.items()):
        if name not in of:
            raise ModelError(
                f"shards=... have a part of {name!r}, which is no parameter of this optimizer",
                fix="give parts the names that the parameters were given with",
            )
        if of[name].parameter.numel() != part.stop - part.start:
            raise ModelError(
                f"parameter {name!r} has {of[name].parameter.numel():,} elements, and its part is {part}",
                fix="start and stop of the part are its first element and the one behind its last",
            )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Says which chunks of the norm are shared, with whom, and what of this process counts.

    Indices of `shared`, by parameter and chunk, are the same on all processes that share them.
    """

    ranks: Ranks
    shared: Mapping[tuple[str, int], int]
    n_shared: int
    counting: Mapping[str, int]
    adds: Sequence[int] | None = None


def across_ranks(
    backend: Backend,
    tracked: Sequence[ParamRecord],
    states: Sequence[BucketState],
    first_chunks: Sequence[Sequence[int]],
    stages: dist.ProcessGroup | None,
    uncounted: Set[str],
    shards: Sequence[FlatShards] = (),
) -> Across | None:
    """Return the norm over all ranks of sharded parameters, and over processes with other `stages` of a model.

    None where this process has all. `uncounted`: names of weights that count on another stage. `shards`: of parameters
    that are flat parts; with them `stages` are all processes.
    """
    others = None if stages is None else GroupRanks([stages])
    device = tracked[0].local.device
    if shards:
        cut = _by_flat_shards(shards, uncounted)
    elif tracked[0].sharded:
        cut = _by_fsdp2(tracked, uncounted)
    elif others is not None:
        cut = _Cut(GroupRanks([]), {}, 0, dict.fromkeys(uncounted, 0))
    else:
        return None

    def allocate(elements: int) -> Buffer:
        return backend.allocate(Tier.DEVICE, [elements], torch.float32, "norm partials")[0]

    firsts = {t.name: t.first for t in tracked}
    fragments = []
    for b, state in enumerate(states):
        for i, r in enumerate(state.bucket.ranges):
            before = (firsts[r.name] + r.start) // CHUNK_ELEMENTS
            count = chunks_of(r.numel)
            for k in sorted({0, count - 1}):  # no others have a border within
                if (r.name, before + k) in cut.shared:
                    start, stop = k * CHUNK_ELEMENTS, min((k + 1) * CHUNK_ELEMENTS, r.numel)
                    index = cut.shared[r.name, before + k]
                    fragments.append(Fragment(b, i, start, stop, first_chunks[b][i] + k, index))
    counts = torch.tensor(_counted(states, cut.counting), dtype=torch.int64, device=device)
    adds = None if cut.adds is None else torch.tensor(cut.adds, dtype=torch.int64, device=device)
    return Across(cut.ranks, fragments, cut.n_shared, allocate, counts, others, adds)


def _by_fsdp2(tracked: Sequence[ParamRecord], uncounted: Set[str]) -> _Cut:
    """Return how FSDP2 cuts parameters: all ranks of the mesh know all of them."""
    from hostward.distributed import fsdp2

    shared: dict[tuple[str, int], int] = {}
    for t in tracked:
        for chunk in fsdp2.layout_of(t.name, t.parameter).shared_chunks():
            shared[t.name, chunk] = len(shared)
    counting = {t.name: int(t.name not in uncounted and fsdp2.counts(t.parameter)) for t in tracked}
    ranks = GroupRanks(fsdp2.mesh_groups(tracked[0].parameter))
    return _Cut(ranks, shared, len(shared), counting)


def _by_flat_shards(shards: Sequence[FlatShards], uncounted: Set[str]) -> _Cut:
    """Return how owners of flat buffers cut parameters: each group of processes has shared chunks of its own."""
    shared: dict[tuple[str, int], int] = {}
    runs: list[tuple[dist.ProcessGroup | None, int]] = []
    adds: list[int] = []
    for each in shards:
        chunks = each.shared_chunks()
        of: dict[str, dict[int, int]] = {}
        for index, (whole, chunk) in enumerate(chunks, len(adds)):
            of.setdefault(whole, {})[chunk] = index
        shared |= {(name, chunk): i for name, part in each.parts.items() for chunk, i in of.get(part.whole, {}).items()}
        runs.append((each.group, len(chunks)))
        adds += [int(each.is_first)] * len(chunks)
    return _Cut(ShardRanks(runs), shared, len(adds), dict.fromkeys(uncounted, 0), adds)


def _counted(states: Sequence[BucketState], counting: Mapping[str, int]) -> list[int]:
    """Return for each partial sum what its parameter has in `counting`, 1 by default."""
    ranges = [r for state in states for r in state.bucket.ranges]
    return [counting.get(r.name, 1) for r in ranges for _ in range(chunks_of(r.numel))]


class EmptyParts:
    """EmptyParts keeps the step counts of parameters of which this process has no element.

    They are int64 [1] on the device, by name. Other ranks count these parameters together with their state. Here
    nothing steps, and yet a saved state has one count for all ranks.
    """

    def __init__(self, backend: Backend, tracked: Sequence[ParamRecord], before: EmptyParts | None) -> None:
        """Allocate the counts. `before`: those that there were before parameters were added."""
        self._backend = backend
        self._counts: dict[str, Buffer] = {} if before is None else dict(before._counts)
        empty = [t.name for t in tracked if t.sharded and not t.local.numel() and t.parameter.numel()]
        names = [name for name in empty if name not in self._counts]
        counts = backend.allocate(Tier.DEVICE, [1] * len(names), torch.int64, "step counts") if names else []
        self._counts |= dict(zip(names, counts, strict=True))

    def counts(self) -> Mapping[str, torch.Tensor]:
        return {name: count.data for name, count in self._counts.items()}

    def step(self, names: Sequence[str], skip: Buffer) -> None:
        """Advance the counts of those among `names` whose step was issued, unless the step is skipped."""
        stepped = [self._counts[name] for name in names if name in self._counts]

        def run() -> None:
            for count in stepped:
                count.data.add_(1 - skip.data)

        if stepped:
            self._backend.launch("offload/empty parts", run, reads=[skip], writes=stepped).issue()


class Sharded:
    """Sharded waits for weights before FSDP2 gathers, and clears what is stored in `.grad` before it reduces.

    Args:
        layers: the layer with which each tracked parameter is used, by name.
    """

    def __init__(
        self,
        groups: fsdp2.Groups,
        tracked: Sequence[ParamRecord],
        layers: Mapping[str, str],
        executor: StepExecutor,
        grad_hooks: GradientHooks,
    ) -> None:
        self._names = {id(t.parameter): t.name for t in tracked}
        self._layers = layers
        self._executor = executor
        self._grad_hooks = grad_hooks
        self._groups = groups
        groups.listen(self)

    def _layers_of(self, parameters: Sequence[torch.Tensor]) -> dict[str, None]:
        names = [self._names[id(p)] for p in parameters if id(p) in self._names]
        return dict.fromkeys(self._layers[name] for name in names)

    def before_copy_in(self, parameters: Sequence[torch.Tensor], stream: torch.Stream | None) -> None:
        if stream is None:
            self.before_use(parameters)
            return
        # The executor does not know frozen weights, and their fence lets FSDP2 itself read.
        self._executor.asleep.require(Kinds.WEIGHTS, "weights are gathered")
        # The compute stream does not wait: its remaining work would then have to finish before the gather.
        for layer in self._layers_of(parameters):
            self._executor.wait_on_stream(layer, stream)

    def before_use(self, parameters: Sequence[torch.Tensor]) -> None:
        self._executor.asleep.require(Kinds.WEIGHTS, "weights are gathered")
        self._executor.forward_is_here()  # FSDP2's hooks on gradients run on streams of its own
        for layer in self._layers_of(parameters):
            self._executor.wait_for_params(layer)

    def before_gradients(self, parameters: Sequence[torch.Tensor], made_on: torch.Stream) -> None:
        self._executor.grads_made_on(made_on)
        for p in parameters:
            if id(p) in self._names:
                self._grad_hooks.before(self._names[id(p)])

    def close(self) -> None:
        self._groups.close()


# One loss scale on all stages of a pipeline.


class StagesScaler(torch.amp.GradScaler):
    """StagesScaler is a gradient scaler that checks the gradients of all stages of a model, so scales change together.

    torch's own sees those of its own stage. Where all of these were offloaded in backward, the norm over all stages
    reports overflow; whether they were may differ from stage to stage, and then one stage would raise in a step that
    the others take.
    """

    def __init__(self, device: str, stages: dist.ProcessGroup, **options: Any) -> None:
        """Create the scaler. `device`: its type. `stages`: those that the optimizer has. `options`: as of
        `torch.amp.GradScaler`.
        """
        super().__init__(device, **options)
        self._stages = stages

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A stage without gradients takes part, too.
        dist.all_reduce(found.setdefault(found_inf.device, found_inf), op=dist.ReduceOp.MAX, group=self._stages)
        optimizer.looked_at_over = self._stages  # type: ignore[attr-defined]
        return found


def require_one_scale(optimizer: object, stages: object) -> None:
    """Raise ModelError where a gradient scaler has looked at the gradients of one of several `stages` alone."""
    looked = getattr(optimizer, "found_inf", None) is not None
    together = vars(optimizer).pop("looked_at_over", None) is stages  # for this step alone
    if stages is None or not looked or together:
        return
    raise ModelError(
        "a gradient scaler has looked at the gradients of one stage of a pipeline alone",
        why="a step that overflows on one stage is skipped on all, and the loss scales of the others would not follow",
        fix="hostward.optim.sharded.StagesScaler(device, stages) in place of torch.amp.GradScaler(device)",
    )
