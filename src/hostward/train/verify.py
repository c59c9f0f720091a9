"""`hostward verify`: the same run without and with offloading, compared bit for bit.

Both runs use deterministic algorithms, the same threads and the same data. Where an operator has no deterministic
form, both optimizers are fed the same gradients instead, and the verdict says so.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hostward.config import Config
from hostward.engine.backend import Tier
from hostward.errors import ConfigError
from hostward.planner import checked_fraction
from hostward.rules import check
from hostward.training.state import same_bits
from hostward.training.weights import bit_sum

from . import loop
from .definition import differing_role

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("hostward")

MEMORY_TOLERANCE = 0.02
"""Allowed relative difference between the device bytes that fell and those that the placement promised."""

ALLOCATOR_SLACK_BYTES = 2 * 1024 * 1024
"""Torch's CUDA allocator leaves up to 1 MiB unused at the end of a large block; seen at models of a few MiB only."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that was compared."""

    name: str
    held: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run with offloading against the run without."""

    asked_fraction: float
    placed_fraction: float
    claims: list[Claim]

    @property
    def passed(self) -> bool:
        return all(claim.held for claim in self.claims)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All comparisons of one recipe."""

    recipe: str
    iterations: int
    same_gradients: bool
    """Both optimizers were fed the gradients of one model, because an operator has no deterministic form."""
    settings: dict[str, Any]
    losses: list[float]
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.comparisons)

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        fractions = ", ".join(f"{c.asked_fraction:g}" for c in self.comparisons)
        if self.passed:
            return f"identical in every bit at {fractions}, over {self.iterations} iterations"
        failed = sorted({claim.name for c in self.comparisons for claim in c.claims if not claim.held})
        return f"NOT verified: {'; '.join(failed)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one run leaves behind for comparison: copies on the CPU."""

    losses: list[float]
    grad_norms: list[float]
    skipped: list[int]
    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    device_bytes: int | None
    placed_fraction: float
    offloaded_bytes: int
    settings: dict[str, Any]
    unchanged_weights: bool
    differing_role: str | None
    """What the kernels of this placement make differently from the definition."""


def verify(recipe: str, config: Config, fractions: Sequence[float]) -> Verdict:
    """Train `config` at fraction 0 and at each of `fractions` and compare.

    Raises:
        ConfigError: a fraction outside (0, 1] or too small for a bucket, no iteration to run, or options under which
            equal bits are not claimed.
    """
    check(config, world_size=loop.world_size())
    if config.checkpoint.save is not None:
        raise ConfigError("verify saves no checkpoint", fix="leave checkpoint.save out")
    for fraction in fractions:
        if checked_fraction(fraction, "--fraction") == 0:
            raise ConfigError("--fraction 0 is the run that the others are compared with", fix="give fractions above 0")
    if config.optimizer.use_torch_optimizer_for_cpu_offload:
        raise ConfigError(
            "optimizer.use_torch_optimizer_for_cpu_offload=True cannot be verified",
            why="torch's CPU kernels round differently, so equal bits are not claimed for it",
            fix="leave it off",
        )
    same_gradients = False
    try:
        base = _train(recipe, _with_fraction(config, 0.0))
        others = [_train(recipe, _with_fraction(config, f)) for f in fractions]
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        log.warning("%s", str(error).splitlines()[0])
        log.warning("an operator has no deterministic form: both optimizers are fed the same gradients instead")
        same_gradients = True
        pairs = [_train_on_same_gradients(recipe, config, f) for f in fractions]
        base, others = pairs[0][0], [candidate for _, candidate in pairs]
        bases = [reference for reference, _ in pairs]
    if not same_gradients:
        bases = [base] * len(others)
    comparisons = [compare(b, o, f) for b, o, f in zip(bases, others, fractions, strict=True)]
    return Verdict(recipe, len(base.losses), same_gradients, base.settings, base.losses, comparisons)


def compare(base: _Outcome, other: _Outcome, fraction: float) -> Comparison:
    """Every claim about one run with offloading."""
    claims = [
        _trained(base),
        _defined(base, other),
        _equal_numbers("losses", base.losses, other.losses),
        _equal_numbers("gradient norms", base.grad_norms, other.grad_norms),
        _equal_numbers("skipped steps", base.skipped, other.skipped),
        _equal_tensors("final weights", base.weights, other.weights),
    ]
    roles = sorted({role for entry in base.state.values() for role in entry})
    for role in roles:
        mine = {n: e[role] for n, e in base.state.items() if role in e}
        theirs = {n: e[role] for n, e in other.state.items() if role in e}
        claims.append(_equal_tensors(f"final {role}", mine, theirs))
    claims.append(_memory_fell(base, other))
    return Comparison(fraction, other.placed_fraction, claims)


def render(verdict: Verdict) -> list[Table]:
    """Tables for a terminal."""
    from rich.table import Table

    how = "same gradients fed to both" if verdict.same_gradients else "independent runs"
    table = Table(title=f"verify {verdict.recipe}: {verdict.iterations} iterations, {how}")
    for column in ("asked", "placed", "claim", "held", "detail"):
        table.add_column(column)
    for c in verdict.comparisons:
        for claim in c.claims:
            held = "yes" if claim.held else "NO"
            table.add_row(f"{c.asked_fraction:g}", f"{c.placed_fraction:.4f}", claim.name, held, claim.detail)
        table.add_section()
    settings = Table(title="settings of all runs")
    settings.add_column("setting")
    settings.add_column("value")
    for name, value in verdict.settings.items():
        settings.add_row(name, str(value))
    return [table, settings]


def _with_fraction(config: Config, fraction: float) -> Config:
    changed = copy.deepcopy(config)
    changed.model.deterministic_mode = True
    changed.optimizer.optimizer_cpu_offload = fraction > 0
    changed.optimizer.optimizer_offload_fraction = fraction
    return changed


def _prepared(recipe: str, config: Config) -> loop.Run:
    """A run that has something to compare. Raises ConfigError for one that has not."""
    run = loop.prepare(recipe, config)
    plan = run.optimizer.plan
    if plan.asked_fraction and not plan.offloaded_bytes:
        raise ConfigError(
            f"--fraction {plan.asked_fraction:g} offloads no bucket",
            why=f"the state has {len(plan.buckets)} buckets, and this share is less than half of the last one",
            fix="give a larger fraction",
        )
    if run.iteration >= config.train.train_iters:
        raise ConfigError(
            "no iteration is left to compare",
            why=f"the checkpoint is of iteration {run.iteration}, and train.train_iters is {config.train.train_iters}",
            fix="raise train.train_iters, or leave checkpoint.load out",
        )
    return run


def _train(recipe: str, config: Config) -> _Outcome:
    run = _prepared(recipe, config)
    start = _bit_sums(run)
    loop.train(run)
    outcome = _outcome(run, start)
    held = _device_bytes_now()
    del run
    return _with_device_bytes(outcome, held - _device_bytes_now())


def _train_on_same_gradients(recipe: str, config: Config, fraction: float) -> tuple[_Outcome, _Outcome]:
    """Train one model, and step a second one, which never runs forward, with copies of its gradients."""
    plain, offloaded = _with_fraction(config, 0.0), _with_fraction(config, fraction)
    plain.model.deterministic_mode = offloaded.model.deterministic_mode = False
    reference = _prepared(recipe, plain)
    candidate = _prepared(recipe, offloaded)
    if candidate.scaler is not None:
        # A scaler makes its factor when it first scales a loss, and this one never sees any.
        candidate.scaler.scale(torch.zeros((), device=candidate.device))
    start = _bit_sums(reference)
    pairs = list(zip(reference.model.parameters(), candidate.model.parameters(), strict=True))
    while reference.iteration < plain.train.train_iters:
        loop.backward(reference)
        for mine, theirs in pairs:
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        candidate.losses.append(reference.losses[-1])
        loop.step(reference)
        loop.step(candidate)
        reference.optimizer.zero_grad()
        candidate.optimizer.zero_grad()
    outcomes = _outcome(reference, start), _outcome(candidate, start)
    both = _device_bytes_now()
    del candidate, pairs, mine, theirs
    one = _device_bytes_now()
    del reference
    return _with_device_bytes(outcomes[0], one - _device_bytes_now()), _with_device_bytes(outcomes[1], both - one)


def _with_device_bytes(outcome: _Outcome, freed_bytes: int) -> _Outcome:
    """What a run held on a CUDA device, seen by its going: workspaces of libraries, made once, stay out of it."""
    return outcome if outcome.device_bytes is not None else replace(outcome, device_bytes=freed_bytes)


def _bit_sums(run: loop.Run) -> list[int]:
    return [bit_sum(p.data) for p in run.model.parameters()]


def _outcome(run: loop.Run, start: Sequence[int]) -> _Outcome:
    state = run.optimizer.state_dict()["state"]
    simulated = run.device.type != "cuda"
    device_bytes = run.optimizer.backend.ledger.total_bytes(Tier.DEVICE) if simulated else None
    settings = {
        **run.optimizer.backend.describe(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "experts implementation": run.config.model.experts_implementation,
        "attention implementation": run.config.model.attn_implementation,
        "dtype": run.config.model.params_dtype,
        "data": run.dataset.description,
    }
    weights = {n: p.detach().cpu().clone() for n, p in run.model.named_parameters()}
    plan, dtype = run.optimizer.plan, next(run.model.parameters()).dtype
    return _Outcome(
        run.losses,
        run.grad_norms,
        run.skipped,
        weights,
        state,
        device_bytes,
        plan.placed_fraction,
        plan.offloaded_bytes,
        settings,
        unchanged_weights=_bit_sums(run) == start,
        differing_role=differing_role(run.device, dtype, 1.0 if plan.placed_fraction else 0.0),
    )


def _device_bytes_now() -> int:
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _trained(base: _Outcome) -> Claim:
    """Equal garbage is no identity: the run that is compared with must have trained."""
    problem = None
    moments = [t for entry in base.state.values() for t in entry.values()]
    if not all(math.isfinite(loss) for loss in base.losses):
        problem = f"loss {next(i for i, loss in enumerate(base.losses) if not math.isfinite(loss))} is not finite"
    elif len(base.skipped) == len(base.losses):
        problem = "every step was skipped"
    elif not all(t.isfinite().all() for t in (*base.weights.values(), *moments)):
        problem = "a final weight or moment is not finite"
    elif base.unchanged_weights:
        problem = "the weights are those of the start"
    return Claim("the run without offloading trained", problem is None, problem or "finite losses, weights moved")


def _defined(base: _Outcome, other: _Outcome) -> Claim:
    name = "kernels equal the definition"
    for placement, role in (("device", base.differing_role), ("host", other.differing_role)):
        if role is not None:
            return Claim(name, False, f"{role} of a {placement} bucket differs from numpy")
    return Claim(name, True, "device and host, against numpy")


def _equal_numbers(name: str, mine: Sequence[float], theirs: Sequence[float]) -> Claim:
    # repr tells 0.0 from -0.0 and lets NaN equal itself.
    different = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if repr(a) != repr(b)]
    if len(mine) != len(theirs):
        return Claim(f"{name} equal", False, f"{len(mine)} against {len(theirs)}")
    if not different:
        return Claim(f"{name} equal", True, f"{len(mine)} values")
    i = different[0]
    return Claim(f"{name} equal", False, f"{len(different)} differ, first at {i}: {mine[i]!r} and {theirs[i]!r}")


def _equal_tensors(name: str, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> Claim:
    different = [n for n in mine if n not in theirs or not same_bits(mine[n], theirs[n])]
    if not different and mine.keys() == theirs.keys():
        elements = sum(t.numel() for t in mine.values())
        return Claim(f"{name} equal", True, f"{len(mine)} tensors, {elements:,} elements")
    return Claim(f"{name} equal", False, f"{len(different)} of {len(mine)} tensors differ: {', '.join(different[:3])}")


def _memory_fell(base: _Outcome, other: _Outcome) -> Claim:
    fell, promised = (base.device_bytes or 0) - (other.device_bytes or 0), other.offloaded_bytes
    slack = 0 if base.settings.get("backend") == "simulated" else ALLOCATOR_SLACK_BYTES
    allowed = max(int(MEMORY_TOLERANCE * promised), slack)
    detail = f"{fell:,} fell, {promised:,} promised, within {allowed:,}"
    return Claim("device bytes fell as promised", abs(fell - promised) <= allowed, detail)
