"""Choose the configurations with offloading that `hostward verify` compares with the same ones without."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from hostward.config.rules.table import changed, data_parallel_size
from hostward.config.schema import Config, options
from hostward.core.placement import Placement, Plan, checked_fraction
from hostward.errors import ConfigError
from hostward.trainer.plan_request import shares

PLACEMENTS = ("host", "streamed", "mixed")
SCHEDULES = ("hidden", "serial")
FRACTIONS = (0.25, 0.5, 1.0)

WORDS = (
    "N% host: that share of the optimizer state is on the host, with a CPU optimizer step; streamed: it is there and "
    "is stepped on the device; mixed: half of it each. hidden: overlapped with backward and the next forward; serial: "
    "between them. Averages, norms, clamps and copies: in runs that make them after each step without notifying the "
    "optimizer."
)
ACTIVATIONS, WEIGHTS = "saved activations", "weights of layers"
MIX = 0.5
"""Streamed share of the offloaded state in a mixed case."""

_DEFAULT = ((0.25, "host", "serial"), (0.5, "mixed", "hidden"), (1.0, "host", "hidden"), (1.0, "streamed", "hidden"))
"""Cases that cover each placement and each schedule once, in as few runs as possible."""

_OFFLOADING = (
    "model.cpu_offloading",
    "model.cpu_offloading_num_layers",
    "model.cpu_offloading_activations",
    "model.cpu_offloading_weights",
    "model.cpu_offloading_double_buffering",
    "model.cpu_offloading_retain_pinned_cpu_buffers",
    "model.fine_grained_activation_offloading",
    "model.offload_modules",
    "model.min_offloaded_tensor_size",
    "model.activation_offload_fraction",
    "model.fine_grained_offloading_max_inflight_offloads",
    "model.cuda_graph_impl",
    "optimizer.optimizer_cpu_offload",
    "optimizer.optimizer_offload_fraction",
    "optimizer.overlap_cpu_optimizer_d2h_h2d",
    "optimizer.gradients",
    "optimizer.pin_cpu_grads",
    "optimizer.pin_cpu_params",
    "optimizer.offload_mix",
    "optimizer.step_early",
    "optimizer.offload_optimizer_states",
    "optimizer.optimizer_state_offload_fraction",
    "optimizer.optimizer_state_offload_chunk_size_mb",
)

_KEPT_AS_GIVEN = (
    "model.cpu_offloading",
    "model.fine_grained_activation_offloading",
    "model.cuda_graph_impl",
    "optimizer.gradients",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Describes a configuration to compare: offloaded share, placement, schedule, microbatches per step and rank.

    `config` is the whole configuration. A placement or schedule of "as given" is that of the options.
    """

    fraction: float
    placement: str
    schedule: str
    microbatches: int
    config: Config

    @property
    def name(self) -> str:
        """Return the case's name for tables; WORDS explains the terms."""
        count = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        how = "as the options say" if self.placement == self.schedule else f"{self.placement}, {self.schedule}"
        what = f"{100 * self.fraction:g}%" if self.fraction else " and ".join(offloaded_by_layers(self.config))
        return f"{what} {how}, {count}"

    def require_placed(self, plan: Plan) -> None:
        """Raise ConfigError for a plan that would prove nothing about this case.

        What layers offload besides state is known only after they have run.
        """
        if not self.fraction:
            return
        wanted = {
            "host": (Placement.HOST,),
            "streamed": (Placement.STREAMED,),
            "mixed": (Placement.HOST, Placement.STREAMED),
        }
        buckets = f"the state has {len(plan.buckets)} buckets"
        if not plan.offloaded_bytes:
            raise ConfigError(
                f"--fraction {self.fraction:g} offloads no bucket",
                why=f"{buckets}, and this share is less than half of the last one",
                fix="give a larger fraction",
            )
        missing = [p.value for p in wanted.get(self.placement, ()) if not plan.count(p)]
        if missing:
            raise ConfigError(
                f"--placement {self.placement} at --fraction {self.fraction:g} makes no bucket {missing[0]}",
                why=f"{buckets}: {plan.count(Placement.HOST)} host, {plan.count(Placement.STREAMED)} streamed",
                fix="give a larger fraction",
            )


def offloads_activations(config: Config) -> bool:
    """Return whether the options offload what layers save for backward."""
    model = config.model
    return model.fine_grained_activation_offloading or (model.cpu_offloading and model.cpu_offloading_activations)


def offloaded_by_layers(config: Config) -> list[str]:
    """Return what the options offload besides optimizer state: ACTIVATIONS, WEIGHTS, both or neither."""
    found = [ACTIVATIONS] if offloads_activations(config) else []
    return [*found, WEIGHTS] if config.model.cpu_offloading and config.model.cpu_offloading_weights else found


def without_offloading(config: Config) -> Config:
    """Return the same configuration with all state on the device."""
    changed = copy.deepcopy(config)
    for name in _OFFLOADING:
        namespace, _, option = name.partition(".")
        setattr(getattr(changed, namespace), option, options()[name].default)
    return changed


def choose(
    config: Config,
    fractions: Sequence[float],
    placements: Sequence[str],
    schedules: Sequence[str],
    microbatches: Sequence[int],
    *,
    world_size: int = 1,
    divide: bool = False,
) -> list[Case]:
    """Return every combination of the given values.

    If neither fraction, placement nor schedule is given: the options' own case, if they offload anything, else four
    cases that cover all placements and schedules.

    Args:
        microbatches: microbatches of one rank in a step; world_size: number of ranks.
        divide: reduce a microbatch to a rank's share of a step, if a larger one would leave some rank without samples.

    Raises:
        ConfigError: an unknown word, a number out of range, or conflicting choices.
    """
    _require_known("--placement", placements, PLACEMENTS)
    _require_known("--schedule", schedules, SCHEDULES)
    for fraction in fractions:
        if checked_fraction(fraction, "--fraction") == 0:
            raise ConfigError("--fraction 0 is the run that the others are compared with", fix="give fractions above 0")
    given = bool(fractions or placements or schedules)
    offloads = config.optimizer.optimizer_cpu_offload or config.optimizer.offload_optimizer_states
    if given and offloads:
        raise ConfigError(
            "verify was given twice what to compare",
            why="--fraction, --placement and --schedule choose it, and so do the options that offload optimizer state",
            fix="use one of them",
        )
    if divide and not microbatches and 0 < _of_rank(config, world_size) < config.train.micro_batch_size:
        microbatches = [1]
    counts = [_with_microbatches(config, count, world_size) for count in microbatches] or [config]
    own = shares(config).offload_fraction
    if not given and (own or offloaded_by_layers(config)):
        return [Case(own, "as given", "as given", _microbatches(c, world_size), c) for c in counts]
    dropped = changed(config, _KEPT_AS_GIVEN)
    if dropped:
        raise ConfigError(
            f"verify would not use {', '.join(dropped)}",
            why="its own cases choose what is offloaded, and disable other offloading",
            fix="give the optimizer's share as options (optimizer.optimizer_cpu_offload=True "
            "optimizer.optimizer_offload_fraction=1.0): then the options as given are what is compared",
        )
    wanted = list(product(fractions or FRACTIONS, placements or PLACEMENTS[:1], schedules or SCHEDULES[:1]))
    return [_case(c, world_size, *choice) for c in counts for choice in (wanted if given else _DEFAULT)]


def _case(config: Config, world_size: int, fraction: float, placement: str, schedule: str) -> Case:
    changed = without_offloading(config)
    optimizer = changed.optimizer
    if placement == "streamed":
        optimizer.offload_optimizer_states = True
        optimizer.optimizer_state_offload_fraction = fraction
    else:
        optimizer.optimizer_cpu_offload = True
        optimizer.optimizer_offload_fraction = fraction
        optimizer.offload_mix = MIX if placement == "mixed" else None
    optimizer.overlap_cpu_optimizer_d2h_h2d = schedule == "hidden"
    return Case(fraction, placement, schedule, _microbatches(changed, world_size), changed)


def _microbatches(config: Config, world_size: int) -> int:
    return _of_rank(config, world_size) // max(1, config.train.micro_batch_size)


def _of_rank(config: Config, world_size: int) -> int:
    """Return the sequences that a rank trains on in a step.

    A batch that cannot be divided raises with the other options.
    """
    return config.train.global_batch_size // data_parallel_size(config, world_size)


def _with_microbatches(config: Config, count: int, world_size: int) -> Config:
    total = _of_rank(config, world_size)
    size, rest = divmod(total, count) if count > 0 else (0, 1)
    if rest or not size:
        counts = [str(n) for n in range(1, total + 1) if total % n == 0]
        share = "" if total == config.train.global_batch_size else f", of which each rank has {total}"
        raise ConfigError(
            f"--microbatches {count} does not divide train.global_batch_size={config.train.global_batch_size}{share}",
            fix=f"--microbatches {' or '.join(counts)}, or set train.global_batch_size",
        )
    changed = copy.deepcopy(config)
    changed.train = replace(changed.train, micro_batch_size=size)
    return changed


def _require_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for word in given:
        if word not in known:
            raise ConfigError(
                f"{option} {word} is unknown", fix=f"write {option} {', '.join(known[:-1])} or {known[-1]}"
            )
