"""Predicted seconds of a training step, for a workload, a choice and a machine. Pure arithmetic; no torch.

A step is played as work on four lanes (`hostward.lanes`): compute, both directions of the link, the host's step. Two
steps in a row are played, and the second counts, so that what drains into the next step is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from hostward.core.placement import Placement
from hostward.plan.cost_model import Costs, Speeds
from hostward.plan.decisions import Choice, Keep
from hostward.plan.lane_simulator import Program, Queue, Timeline, busy_s, run
from hostward.plan.memory_model import Needs, required
from hostward.plan.step_timeline import Turn
from hostward.plan.workload import Workload

_SHORTEST_S = 1e-4
"""Waits shorter than this are not told."""
_HIDDEN = 0.02
"""Of a step: less than this exposed counts as hidden."""
_TOLD = 0.05
"""Of what is exposed: lesser waits are not told."""
_TOLD_S = 5e-6
"""What is exposed and less is told as nothing."""
_MOST_DOUBLINGS = 6
_ROUNDING = 1 - 1e-9
"""Sums in another order differ."""

RESOURCES = {
    Queue.COMPUTE: "GPU",
    Queue.D2H: "link to the host",
    Queue.H2D: "link to the GPU",
    Queue.HOST: "host AdamW",
}
_NAMES = {
    "upload": "host AdamW and the weights' way back",
    "host": "host AdamW",
    "read": "optimizer state on its way to the GPU",
    "write": "optimizer state on its way to the host",
    "gradient": "gradients on their way to the host",
    "offload": "activations on their way to the host",
    "reload": "activations on their way to the GPU",
    "fetch": "weights on their way to the GPU",
    "add": "gradients added up on the host",
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one step."""

    step_s: float
    compute_s: float
    """What the GPU computes, recomputation and its own optimizer step included."""
    forward_s: float
    """Of the first microbatch: what hides the work between two steps."""
    backward_s: float
    """Of the last."""
    busy_s: Mapping[Queue, float]
    """Work per lane, each alone."""
    waited_s: Mapping[str, float]
    """What compute waited for, by kind."""

    @property
    def exposed_s(self) -> float:
        """Seconds that the GPU stands still for offloading."""
        return max(0.0, self.step_s - self.compute_s)


def predict(workload: Workload, choice: Choice, speeds: Speeds) -> Prediction:
    """The step of `workload` as `choice` has it."""
    return predict_of(Costs(workload, speeds), choice, required(workload, choice))


def predict_of(costs: Costs, choice: Choice, needs: Needs) -> Prediction:
    """As `predict`, for many choices of one workload; `needs`: of the choice."""
    microbatches = costs.workload.microbatches
    units = costs.units(choice)
    pair_s, pair_busy_s = _middle_s(costs, Turn(costs, choice, needs, units)) if microbatches > 2 else (0.0, {})
    turn = Turn(costs, choice, needs, units)
    marks = []
    for _ in range(2):
        first = len(turn.program.works)
        turn.backward(last=True)
        turn.step()
        turn.forward(first=True)
        if microbatches > 1:
            turn.backward(last=False)
            turn.forward(first=False)
        if microbatches > 2:
            turn.compute = turn.program.add("middle", Queue.COMPUTE, (microbatches - 2) * pair_s)
        marks.append((first, len(turn.program.works)))
    timeline = run(turn.program, costs.speeds.slowdown)
    return _prediction(costs, turn.program, timeline, marks, pair_s, pair_busy_s)


def least_s(costs: Costs, choice: Choice) -> float:
    """Seconds that `predict` never falls below, where all buckets are of the workload's layers: compute alone, and what
    host or link do between a step and the end of the forward behind it.
    """
    units, speeds = costs.units(choice), costs.speeds
    device_s = sum(u.device_s for u in units if u.placement is Placement.DEVICE)
    norm_s = sum(u.gradient_bytes for u in units) / speeds.traffic_bytes_per_s
    microbatches_s = costs.workload.microbatches * _computed_s(costs, costs.keep_of(choice))
    host_s = sum(u.host_s for u in units if u.placement is Placement.HOST)
    written = sum(u.state_bytes for u in units if u.placement is Placement.STREAMED)
    forward_s = sum(c.forward_s for c in costs.layers)
    behind_s = max(host_s, written / speeds.d2h_bytes_per_s) - forward_s
    return (microbatches_s + device_s + norm_s + max(0.0, behind_s)) * _ROUNDING


def _computed_s(costs: Costs, keeps: Mapping[int, Keep]) -> float:
    """Of one microbatch, adding its gradients included."""
    again = sum(costs.layers[i].again_s(keep) for i, keep in keeps.items())
    computed = sum(c.forward_s + c.backward_s for c in costs.layers)
    return computed + again + sum(costs.numels) * costs.accumulation_s


def _middle_s(costs: Costs, turn: Turn) -> tuple[float, Mapping[Queue, float]]:
    """Seconds of one microbatch among many, without a step near it, and work per lane, each alone."""
    if not (turn.leaving or turn.fetched or turn.choice.gradients_on_host):
        computed = _computed_s(costs, turn.keep)
        return computed, {Queue.COMPUTE: computed}
    ends, first = [], 0
    for _ in range(2):
        first = len(turn.program.works)
        turn.backward(last=False)
        turn.forward(first=False)
        ends.append(turn.compute)
    timeline = run(turn.program, costs.speeds.slowdown)
    before, after = (timeline.ends_s[e] for e in ends if e is not None)
    return after - before, busy_s(turn.program, first, len(turn.program.works))


def _prediction(
    costs: Costs,
    program: Program,
    timeline: Timeline,
    marks: list[tuple[int, int]],
    pair_s: float,
    pair_busy_s: Mapping[Queue, float],
) -> Prediction:
    (_, middle), (_, stop) = marks
    compute = [i for i, work in enumerate(program.works) if work.queue is Queue.COMPUTE]
    ends = [max(i for i in compute if i < mark) for mark in (middle, stop)]
    step_s = timeline.ends_s[ends[1]] - timeline.ends_s[ends[0]]
    busy = busy_s(program, middle, stop)
    microbatches = costs.workload.microbatches
    more = microbatches - 2
    waited = _waited(program, timeline, [i for i in compute if i >= ends[0]])
    if more > 0:
        for queue, seconds in pair_busy_s.items():
            busy[queue] += more * seconds
        # The piece "middle" stands for them, with what they wait.
        busy[Queue.COMPUTE] -= more * pair_s
        stalled = more * (pair_s - pair_busy_s[Queue.COMPUTE])
        if stalled > _SHORTEST_S:
            waited["microbatches in between"] = stalled
    forward = sum(c.forward_s for c in costs.layers)
    names = [i for i in compute if i >= middle and program.works[i].name.startswith("backward")]
    backward = sum(program.works[i].seconds for i in names) / max(1, min(2, microbatches))
    return Prediction(step_s, busy[Queue.COMPUTE], forward, backward, busy, waited)


def _waited(program: Program, timeline: Timeline, compute: list[int]) -> dict[str, float]:
    """Seconds for which compute stood still, by the kind of work that ended last before it went on."""
    found: dict[str, float] = {}
    for before, after in pairwise(compute):
        gap = timeline.starts_s[after] - timeline.ends_s[before]
        if gap <= _SHORTEST_S:
            continue
        work = program.works[after]
        kind = program.works[max(work.waits, key=lambda w: timeline.ends_s[w])].name
        name = _NAMES.get(kind, kind)
        found[name] = found.get(name, 0.0) + gap
    return found


def explain(costs: Costs, choice: Choice, prediction: Prediction) -> list[str]:
    """Sentences that say what is exposed and why, and what would hide it."""
    if prediction.exposed_s < _HIDDEN * prediction.step_s:
        rest = f"all but {_told_s(prediction.exposed_s)}" if prediction.exposed_s >= _TOLD_S else "all"
        return [f"{rest} of the offloading is hidden behind compute"]
    said = []
    host_s = prediction.busy_s[Queue.HOST]
    if prediction.waited_s.get(_NAMES["upload"], 0.0) >= 0.5 * prediction.exposed_s:
        said.append(f"host AdamW {_told_s(host_s)} does not fit behind a {_told_s(prediction.forward_s)} forward")
    for queue in (Queue.D2H, Queue.H2D):
        window = prediction.forward_s + prediction.backward_s
        if prediction.busy_s[queue] > window * costs.workload.microbatches:
            said.append(
                f"the {RESOURCES[queue]} is busy for {_told_s(prediction.busy_s[queue])}, "
                f"forward and backward take {_told_s(window * costs.workload.microbatches)}"
            )
    waits = sorted(prediction.waited_s.items(), key=lambda pair: -pair[1])
    told = [f"{_told_s(seconds)} for {name}" for name, seconds in waits if seconds >= _TOLD * prediction.exposed_s]
    said = ["; ".join([*said, _cure(costs, choice)])]
    return [*said, f"the GPU waits {', '.join(told)}"] if told else said


def _told_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.05 else f"{1e3 * seconds:.2f} ms"


def _cure(costs: Costs, choice: Choice) -> str:
    """How many tokens per step of one GPU would hide it, by trying."""
    workload = costs.workload
    sequences = workload.microbatch_sequences
    for _ in range(_MOST_DOUBLINGS):
        sequences *= 2
        if _is_hidden(costs, choice, sequences):
            break
    else:
        return f"even {_tokens(workload, sequences)} would not hide it, memory aside"
    low, high = sequences // 2, sequences
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (low, middle) if _is_hidden(costs, choice, middle) else (middle, high)
    return f"{_tokens(workload, high)} would hide it, memory aside"


def _is_hidden(costs: Costs, choice: Choice, sequences: int) -> bool:
    found = predict(replace(costs.workload, microbatch_sequences=sequences), choice, costs.speeds)
    return found.exposed_s < _HIDDEN * found.step_s


def _tokens(workload: Workload, sequences: int) -> str:
    """Of a step with so many sequences in a microbatch, and as many microbatches as there are."""
    among = f"in {workload.microbatches} microbatches" if workload.microbatches > 1 else "in one microbatch"
    tokens = sequences * workload.microbatches * workload.sequence_tokens
    count = f"{tokens / 1024:.0f} K" if tokens >= 1024 else str(tokens)
    return f"{count} tokens per step{' and GPU' if workload.ranks > 1 else ''} {among}"
