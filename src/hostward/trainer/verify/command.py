"""Run `hostward verify`: the same training without and with offloading, compared bit for bit.

Both runs use deterministic algorithms, the same threads and the same data. Where an operator has no deterministic
form, both optimizers are fed the same gradients instead, and the verdict says so. A second, shorter pair of runs reads
and writes the weights after each step, as `after_step` says. Each of several ranks compares its own part, and there is
one verdict.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from hostward.config.schema import Config
from hostward.config.validate import check
from hostward.core.inventory import Dtype
from hostward.core.placement import Placement
from hostward.errors import ConfigError
from hostward.model.parameters import local_of
from hostward.optim.master_sync import bit_sum
from hostward.runtime.backend import TORCH_DTYPES, Tier
from hostward.trainer import loop, setup
from hostward.trainer.plan_request import state_format
from hostward.trainer.process_group import Ranks
from hostward.trainer.run import Run
from hostward.trainer.setup import require_same_on_all_ranks
from hostward.trainer.verify.after_step import AfterStep, claims_after_steps
from hostward.trainer.verify.cases import ACTIVATIONS, WEIGHTS, WORDS, Case, offloads_activations, without_offloading
from hostward.trainer.verify.claims import Claim, Outcome, claims, differing_role, of_all

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("hostward")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares a run with offloading with the run without."""

    name: str
    asked_fraction: float
    placed_fraction: float
    placement: str
    schedule: str
    microbatches: int
    clipped: int
    """Iterations in which the gradients were clipped."""
    claims: list[Claim]

    @property
    def passed(self) -> bool:
        return all(claim.held for claim in self.claims)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds all comparisons of one recipe."""

    recipe: str
    iterations: int
    same_gradients: bool
    """True if both optimizers got the gradients of one model, because an operator has no deterministic form."""
    settings: dict[str, Any]
    losses: list[float]
    """Losses without offloading; with several counts of microbatches, those of the first."""
    comparisons: list[Comparison]
    ranks: int = 1
    """Ranks on each of which everything was compared."""

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.comparisons)

    @property
    def sentence(self) -> str:
        """Return the verdict in one line."""
        if self.passed:
            names = "; ".join(c.name for c in self.comparisons)
            where = f" on {self.ranks} ranks" if self.ranks > 1 else ""
            return (
                f"PASS: identical in every bit over {self.iterations} iterations{where}, without offloading and with: "
                f"{names}"
            )
        failed = [c for c in self.comparisons if not c.passed]
        broken = sorted({claim.name for c in failed for claim in c.claims if not claim.held})
        names = "; ".join(c.name for c in failed)
        ranks = dict.fromkeys(rank for c in failed for claim in c.claims for rank in claim.broken_on)
        where = f", on {', '.join(ranks)}" if ranks else ""
        cases = f"{len(failed)} of {len(self.comparisons)} cases ({names})"
        return f"FAIL: NOT verified in {cases}: {', '.join(broken)}{where}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, for JSON."""
        return {**asdict(self), "passed": self.passed}


def verify(recipe: str, config: Config, cases: Sequence[Case]) -> Verdict:
    """Train every case and, once per count of microbatches, the same without offloading; compare them.

    Every rank returns the same verdict.

    Raises:
        ConfigError: a case whose plan would prove nothing, no iteration to run, options without claim of
            bitwise identical results, or ranks that were started with different settings.
    """
    ranks = Ranks.of(os.environ)
    # If options alone do not give the number of microbatches, the cases do.
    check(replace(config, train=cases[0].config.train), world_size=ranks.size)
    for case in cases:
        check(case.config, world_size=ranks.size)
    problem = _not_to_verify(config)
    if problem is not None:
        problem.everywhere = True
        raise problem
    device = setup.choose_device(config.train.device, ranks.local_rank)
    ranks.join(device, timedelta(minutes=config.dist.distributed_timeout_minutes))
    require_same_on_all_ranks(ranks, {"what is compared": "; ".join(case.name for case in cases)})
    same_gradients = False
    try:
        pairs = _independent_runs(recipe, cases)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        log.warning("%s", str(error).splitlines()[0])
        log.warning("an operator has no deterministic form: both optimizers are fed the same gradients instead")
        same_gradients = True
        pairs = [_runs_on_same_gradients(recipe, case) for case in cases]
    kernels = _kernels(config, ranks, (p for pair in pairs for o in (pair.base, pair.other) for p in o.placements))
    comparisons = [_comparison(case, pair, ranks, kernels) for case, pair in zip(cases, pairs, strict=True)]
    first = pairs[0].base
    return Verdict(recipe, len(first.losses), same_gradients, first.settings, first.losses, comparisons, ranks.size)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Outcomes of the runs without and with offloading, and of the second pair, which uses weights after each step."""

    base: Outcome
    other: Outcome
    after_base: AfterStep
    after_other: AfterStep


def _comparison(case: Case, pair: _Pair, ranks: Ranks, kernels: dict[Placement, str | None]) -> Comparison:
    found = claims(pair.base, pair.other, kernels) + claims_after_steps(pair.after_base, pair.after_other)
    return Comparison(
        case.name,
        case.fraction,
        pair.other.placed_fraction,
        case.placement,
        case.schedule,
        case.microbatches,
        clipped(case.config.optimizer.clip_grad, pair.base.grad_norms),
        of_all(ranks.gather((ranks.name, found))),
    )


def render(verdict: Verdict) -> list[Table]:
    """Return tables for the terminal."""
    from rich.table import Table

    how = "same gradients fed to both" if verdict.same_gradients else "independent runs"
    heading = f"\nverify {verdict.recipe}: {verdict.iterations} iterations, {how}\n{WORDS}"
    tables = []
    for c in verdict.comparisons:
        title = (
            f"{heading}\n{c.name}: {c.placed_fraction:.2%} placed, {c.clipped} of {verdict.iterations} steps clipped"
        )
        heading = ""
        table = Table(title=title, box=None, title_justify="left", pad_edge=False)
        for column in ("claim", "held", "detail"):
            table.add_column(column)
        for claim in c.claims:
            table.add_row(claim.name, "yes" if claim.held else "NO", claim.detail)
        tables.append(table)
    settings = Table(title="\nsettings of all runs", box=None, show_header=False, title_justify="left", pad_edge=False)
    settings.add_column("setting")
    settings.add_column("value", overflow="fold")
    for name, value in verdict.settings.items():
        settings.add_row(name, str(value))
    return [*tables, settings]


def _independent_runs(recipe: str, cases: Sequence[Case]) -> list[_Pair]:
    bases: dict[int, Outcome] = {}
    after_bases: dict[int, AfterStep] = {}
    pairs = []
    for number, case in enumerate(cases, 1):
        log.info("case %d of %d: %s", number, len(cases), case.name)
        count, without = case.microbatches, without_offloading(case.config)
        if count not in bases:
            bases[count] = _train(recipe, without, None)
        other = _train(recipe, case.config, case)
        if count not in after_bases:
            after_bases[count] = _own_loop(recipe, without, None)
        pairs.append(_Pair(bases[count], other, after_bases[count], _own_loop(recipe, case.config, case)))
    return pairs


def _own_loop(recipe: str, config: Config, case: Case | None) -> AfterStep:
    """Train for some iterations, and use the weights after each step without notifying the optimizer."""
    run = _prepared(recipe, config, case)
    after = AfterStep(run.model)
    with _quiet(), loop.deterministic(True), closing(run.passes):
        for _ in range(_iterations_of(after, run)):
            loop.step(run, loop.backward(run))
            after.act()
            run.optimizer.zero_grad()
        _let_arrive(run)
    return after


def _iterations_of(after: AfterStep, run: Run) -> int:
    return min(after.steps, run.config.train.train_iters - run.iteration)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the optimizer's warnings about verify's own probes, which change weights on purpose and hold their
    memory.

    Everything else was reported by the longer runs before.
    """
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _not_to_verify(config: Config) -> ConfigError | None:
    if config.checkpoint.save is not None:
        return ConfigError("verify saves no checkpoint", fix="leave checkpoint.save out")
    if config.optimizer.use_torch_optimizer_for_cpu_offload:
        return ConfigError(
            "optimizer.use_torch_optimizer_for_cpu_offload=True cannot be verified",
            why="torch's CPU kernels round differently, so its results are not claimed to be bitwise identical",
            fix="leave it off",
        )
    return None


def _kernels(config: Config, ranks: Ranks, placements: Iterable[Placement]) -> dict[Placement, str | None]:
    """Return for each placement what its kernel computes differently from the reference, or None."""
    device = setup.choose_device(config.train.device, ranks.local_rank)
    dtype, form = TORCH_DTYPES[Dtype(config.model.params_dtype)], state_format(config)
    with _quiet():
        return {placement: differing_role(device, dtype, placement, form) for placement in dict.fromkeys(placements)}


def _prepared(recipe: str, config: Config, case: Case | None, *, deterministic: bool = True) -> Run:
    """Prepare a run that has something to compare.

    Raises ConfigError if it has nothing.
    """
    changed = copy.deepcopy(config)
    changed.model.deterministic_mode = deterministic
    run = setup.prepare(recipe, changed)
    problem = _nothing_to_compare(run, case)
    problems = run.ranks.gather(problem is not None)  # a rank with few rows may have none that are offloaded
    if problem is not None and all(problems):
        problem.everywhere = True
        raise problem
    return run


def _nothing_to_compare(run: Run, case: Case | None) -> ConfigError | None:
    until = run.config.train.train_iters
    if run.iteration >= until:
        return ConfigError(
            "no iteration is left to compare",
            why=f"the checkpoint is of iteration {run.iteration}, and train.train_iters is {until}",
            fix="raise train.train_iters, or leave checkpoint.load out",
        )
    try:
        if case is not None:
            case.require_placed(run.optimizer.plan)
    except ConfigError as error:
        return error
    return None


def _train(recipe: str, config: Config, case: Case | None) -> Outcome:
    run = _prepared(recipe, config, case)
    start = _bit_sums(run)
    loop.train(run)
    outcome = _outcome(run, start)
    held = _device_bytes_now()
    del run
    return _with_device_bytes(outcome, held - _device_bytes_now())


def _runs_on_same_gradients(recipe: str, case: Case) -> _Pair:
    """Train one model, and step a second one, which never runs forward, with copies of its gradients."""
    reference, candidate = _two_runs(recipe, case)
    start = _bit_sums(reference)
    _feed(reference, candidate, case.config.train.train_iters - reference.iteration)
    outcomes = _outcome(reference, start), _outcome(candidate, start)
    both = _device_bytes_now()
    del candidate
    one = _device_bytes_now()
    del reference
    base = _with_device_bytes(outcomes[0], one - _device_bytes_now())
    other = _with_device_bytes(outcomes[1], both - one)
    reference, candidate = _two_runs(recipe, case)
    after = AfterStep(reference.model), AfterStep(candidate.model)
    with _quiet():
        _feed(reference, candidate, _iterations_of(after[0], reference), after)
        for run in (reference, candidate):
            _let_arrive(run)
    return _Pair(base, other, *after)


def _two_runs(recipe: str, case: Case) -> tuple[Run, Run]:
    reference = _prepared(recipe, without_offloading(case.config), None, deterministic=False)
    candidate = _prepared(recipe, case.config, case, deterministic=False)
    if candidate.scaler is not None:
        # A scaler initializes its factor when it first scales a loss, and this one never scales any.
        candidate.scaler.scale(torch.zeros((), device=candidate.device))
    return reference, candidate


def _feed(reference: Run, candidate: Run, iterations: int, after: Sequence[AfterStep] = ()) -> None:
    """Step both runs with the gradients of the first.

    `after`: uses the weights of each after its step.
    """
    pairs = list(zip(reference.model.parameters(), candidate.model.parameters(), strict=True))
    for _ in range(iterations):
        loss = loop.backward(reference, taken=False)
        loop.set_learning_rate(candidate)
        with candidate.optimizer.accumulate(last=True):
            for mine, theirs in pairs:
                theirs.grad = None
                if mine.grad is not None:
                    theirs.grad_dtype = mine.grad.dtype  # also if each microbatch's gradient is offloaded by itself
                    theirs.grad = mine.grad.clone()
        for i, run in enumerate((reference, candidate)):
            loop.step(run, loss.clone())  # ranks reduce into it in place
            if after:
                after[i].act()
            run.optimizer.zero_grad()
            loop.collect(run)


def _with_device_bytes(outcome: Outcome, freed_bytes: int) -> Outcome:
    """Add the device bytes that a run held, measured by freeing it, so that libraries' workspaces are not counted."""
    return outcome if outcome.device_bytes is not None else replace(outcome, device_bytes=freed_bytes)


def _bit_sums(run: Run) -> list[int]:
    return [int(bit_sum(weight)) for weight in _weights(run).values()]


def _weights(run: Run) -> dict[str, torch.Tensor]:
    """Return this rank's weights through the state dict: an offloaded parameter has no bytes of its own."""
    state = run.model.state_dict()
    return {name: local_of(state[name]).cpu() for name, _ in run.model.named_parameters()}


def _let_arrive(run: Run) -> None:
    """Wait until every weight has its new value, whatever reads it."""
    run.optimizer.wait()
    loop.collect(run, everything=True)


def _outcome(run: Run, start: Sequence[int]) -> Outcome:
    _let_arrive(run)
    saved = run.optimizer.state_dict()["state"]
    state = {name: {role: local_of(value) for role, value in entry.items()} for name, entry in saved.items()}
    plan, ledger = run.optimizer.plan, run.optimizer.backend.ledger
    settings = {
        **run.optimizer.backend.describe(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "experts implementation": run.config.model.experts_implementation,
        "attention implementation": run.config.model.attn_implementation,
        "dtype": run.config.model.params_dtype,
        "data": run.dataset.description,
    }
    return Outcome(
        losses=run.losses,
        grad_norms=run.grad_norms,
        skipped=run.skipped,
        weights={name: weight.clone() for name, weight in _weights(run).items()},
        state=state,
        device_bytes=None if run.device.type == "cuda" else ledger.total_bytes(Tier.DEVICE),
        placed_fraction=_share(run.ranks.gather((plan.offloaded_bytes, plan.state_bytes))),
        offloaded_bytes=_state_away_bytes(run) + _weights_away_bytes(run),
        left_bytes=_left_bytes(run),
        placements=tuple(p for p in Placement if plan.count(p)),
        settings=settings,
        # Possibly none of a rank's rows was trained.
        unchanged_weights=all(run.ranks.gather(_bit_sums(run) == start)),
    )


def clipped(limit: float, norms: Sequence[float]) -> int:
    """Count the iterations in which gradients were clipped.

    A skipped iteration, whose norm is not finite, clips nothing.
    """
    return sum(limit < norm < math.inf for norm in norms) if limit else 0


def _share(of_ranks: Sequence[tuple[int, int]]) -> float:
    """Return the offloaded share of all state, from each rank's (offloaded bytes, all bytes)."""
    away, held = (sum(column) for column in zip(*of_ranks, strict=True))
    return away / held if held else 0.0


def _state_away_bytes(run: Run) -> int:
    """Return the offloaded bytes as they were on the device, with each range of a bucket aligned.

    Parts of small tensors are mostly alignment.
    """
    pairs = zip(run.optimizer.inventory.buckets, run.optimizer.plan.buckets, strict=True)
    return sum(b.padded_state_bytes for b, row in pairs if row.placement.offloaded)


def _left_bytes(run: Run) -> dict[str, int]:
    """Return the bytes that layers have offloaded since the start, on all ranks.

    A single rank may have none of these layers.
    """
    if run.attachment is None:
        return {}
    report = run.attachment.report()
    found = {ACTIVATIONS: report.offloaded_bytes} if offloads_activations(run.config) else {}
    found |= {} if report.weights is None else {WEIGHTS: report.weights.offloaded_bytes}
    return {name: sum(run.ranks.gather(count)) for name, count in found.items()}


def _weights_away_bytes(run: Run) -> int:
    """Return the bytes of offloaded weights that are off the device now."""
    away = None if run.attachment is None else run.attachment.report().weights
    return 0 if away is None else away.freed_bytes


def _device_bytes_now() -> int:
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
