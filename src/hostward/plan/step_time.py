"""Predict the seconds of a training step, for a workload, a choice and a machine. Pure arithmetic; no torch.

A step is simulated as work on four lanes (`hostward.plan.lane_simulator`): compute, both directions of PCIe or NVLink,
and the CPU optimizer step. Two consecutive steps are simulated and the second counts, so that work which continues into
the next step is counted. Each step follows the schedules of `hostward.schedule` as far as they take time, in the same
order on each lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from hostward.core.placement import Placement
from hostward.plan.cost_model import LAYERS_IN_FLIGHT, Costs, Speeds, Unit
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.lane_simulator import NOTHING, Program, Queue, Timeline, busy_s, run
from hostward.plan.memory_model import Needs, required
from hostward.plan.workload import Workload
from hostward.schedule.activations import FIRST_GROUP_BYTES
from hostward.schedule.optimizer import LANDING_BUFFERS
from hostward.schedule.staging import MIN_STAGING_BUFFERS
from hostward.schedule.weights import weight_prefetch_depth


class StepTimeline:
    """Append the parts of a step to a program, with the work that each waits for across parts.

    Args:
        needs: of the choice: GPU staging buffers of streamed buckets, and when they are acquired.
        units: as `costs` makes them of the choice.
    """

    def __init__(self, costs: Costs, choice: Choice, needs: Needs, units: Sequence[Unit]) -> None:
        self.costs, self.choice = costs, choice
        self.program = Program()
        self.units = units
        self.keep = costs.keep_of(choice)
        by_layer: dict[str, list[int]] = {}
        for number, unit in enumerate(self.units):
            by_layer.setdefault(unit.layer, []).append(number)
        self._of = [by_layer.get(cost.layer.name, []) for cost in costs.layers]
        """Units of each layer."""
        self._place = {i: place for place, i in enumerate(costs.repeated)}
        """Of each repeated layer, among these."""
        self.streamed = [i for i, u in enumerate(self.units) if u.placement is Placement.STREAMED]
        leaving = [i for i in costs.repeated if self.keep[i] in LEAVES]
        self.leaving = leaving
        self.window = max(1, len(costs.repeated) - len(leaving))
        self._ahead = weight_prefetch_depth(gathered=costs.workload.ranks > 1)
        self.fetched = {i for i, c in enumerate(costs.layers) if c.layer.name in choice.offloaded_weights}
        self.slots = costs.moved(choice).staged(needs.slots)
        self._staged_layers = [self._layer_of(bucket) for bucket in needs.stage_at]
        # Newest work of each kind, by unit or layer.
        self.compute = NOTHING
        self._computes: list[int] = []
        self.offloads: dict[int, int] = {}
        self.hosts: dict[int, int] = {}
        self.arrivals: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        self._began_s = self._reading_s = 0.0
        """Seconds taken by the last backward, and those of it until the staged state has been read."""
        self.writes: list[int] = []
        self.downloaded: list[int] = []
        self.added: list[int] = []

    def _layer_of(self, bucket: int) -> int:
        """Return the layer of a bucket; the first layer where none has that name, as a caller may name layers
        otherwise.
        """
        names = [cost.layer.name for cost in self.costs.layers]
        layers = [b.layer for b in self.costs.workload.inventory.buckets[bucket : bucket + 1]]
        return names.index(layers[0]) if layers and layers[0] in names else 0

    def run(self, name: str, seconds: float, waits: Sequence[int] = ()) -> int:
        """Append work of the GPU, which is the newest from then on, and return its number."""
        self.compute = self.program.add(name, Queue.COMPUTE, seconds, waits)
        self._computes.append(self.compute)
        return self.compute

    # ------------------------------------------------------------------ parts

    def forward(self, *, first: bool) -> None:
        """Append a forward.

        Args:
            first: whether it follows a step, so that its layers wait for their weights.
        """
        anew = self.costs.workload.fetched_anew
        for i, cost in enumerate(self.costs.layers):
            waits: list[int] = []
            if first:
                waits += [self.arrivals[u] for u in self._of[i] if u in self.arrivals]
                # Staging buffers are released before the last layer, after the last write.
                waits += self.writes[-1:] if i == len(self.costs.layers) - 1 else []
            if i in self.fetched and (first or anew):
                waits.append(self._fetch(i))
            if cost.layer.repeated and self._place[i] >= self.window:
                waits.append(self.offloads.get(self.costs.repeated[self._place[i] - self.window], NOTHING))
            before_it = self.compute
            self.run(f"forward/{cost.layer.name}", cost.forward_s, waits)
            if i in self.leaving:
                size = cost.held_bytes(self.keep[i])
                # An input exists when the layer begins, and is offloaded then if it fills a group of its own.
                at_once = self.keep[i] is Keep.RECOMPUTE_OFFLOAD and size >= FIRST_GROUP_BYTES
                self.offloads[i] = self.program.add(
                    "offload",
                    Queue.D2H,
                    self.costs.kept(i, self.keep[i]).offload_s,
                    [before_it, *waits] if at_once else [self.compute],
                )

    def _fetch(self, i: int) -> int:
        """Prefetch the offloaded weights of a layer while its predecessor runs; parts of them one layer earlier."""
        # Issued in that layer's pre-forward hook: its start cannot be a wait, the end of the layer before can.
        entered = self._computes[-1 - self._ahead] if len(self._computes) > self._ahead else NOTHING
        steps = [self.hosts[u] for u in self._of[i] if u in self.hosts]
        return self.program.add("fetch", Queue.H2D, self.costs.layers[i].fetch_s, [entered, *steps])

    def backward(self, *, last: bool) -> None:
        """Append a backward.

        Args:
            last: whether it is the step's last microbatch, during which gradients are offloaded and state is
                prefetched.
        """
        costs, moved = self.costs, self.costs.moved(self.choice)
        reloads: dict[int, int] = {}
        released = self.leaving[: max(0, len(costs.repeated) - self.window)]
        waiting = list(released)
        downloads: list[int] = []
        left_before = [NOTHING] * LAYERS_IN_FLIGHT
        leaves = last or self.choice.gradients_on_host
        left_s = sum(self._backward_s)
        for i in reversed(range(len(costs.layers))):
            cost = costs.layers[i]
            while waiting and cost.layer.repeated and self._place[waiting[-1]] >= self._place[i] - self.window:
                u = waiting.pop()
                seconds = costs.kept(u, self.keep[u]).reload_s
                reloads[u] = self.program.add(
                    "reload", Queue.H2D, seconds, [self.compute, self.offloads.get(u, NOTHING)]
                )
            if last:
                self._stage(i, left_s)
            left_s -= self._backward_s[i]
            fetch = self._fetch(i) if i in self.fetched and costs.workload.fetched_anew else NOTHING
            waits = [reloads.get(i, NOTHING), fetch, left_before[-LAYERS_IN_FLIGHT]]
            self.run(f"backward/{cost.layer.name}", self._backward_s[i], waits)
            for u in reversed(self._of[i] if leaves else []):
                if u not in moved.gradients_of:
                    continue
                copy_s, added_s = moved.gradients_of[u]
                landing_free = self.added[-LANDING_BUFFERS : 1 - LANDING_BUFFERS]
                downloads.append(self.program.add("gradient", Queue.D2H, copy_s, [self.compute, *landing_free]))
                if self.choice.gradients_on_host:
                    self.added.append(self.program.add("add", Queue.HOST, added_s, [downloads[-1]]))
            left_before.append(downloads[-1] if downloads else NOTHING)
        self.downloaded = downloads[-1:]

    @cached_property
    def _backward_s(self) -> Sequence[float]:
        """Return the compute seconds of each layer's backward."""
        costs, found = self.costs, []
        for i, cost in enumerate(costs.layers):
            numel = sum([self.units[u].numel for u in self._of[i]])
            again_s = costs.kept(i, self.keep.get(i, Keep.KEEP)).again_s
            found.append(cost.backward_s + again_s + numel * costs.accumulation_s)
        return found

    def _read(self, u: int, waits: Sequence[int]) -> None:
        speeds = self.costs.speeds
        seconds = speeds.copy_s(self.units[u].state_bytes, speeds.h2d_bytes_per_s)
        self.reads[u] = self.program.add("read", Queue.H2D, seconds, waits)

    def _stage(self, layer: int, left_s: float) -> None:
        """Prefetch state before a layer's backward, as far as buffers and the rest of backward allow.

        Args:
            left_s: seconds from the layer's backward to the end of backward.
        """
        if layer == len(self.costs.layers) - 1:
            self.reads, self._reading_s, self._began_s = {}, 0.0, left_s
        passed_s = self._began_s - left_s
        count = len(self._staged_layers)
        while (at := len(self.reads)) < self.slots:
            room = self._staged_layers[at * count // self.slots] >= layer
            if not room or (at >= MIN_STAGING_BUFFERS and self._reading_s >= self._began_s):
                break
            self._reading_s = max(self._reading_s, passed_s)
            self._read(self.streamed[at], [self.compute, *self.writes[-1:]])
            self._reading_s += self.program.seconds[self.reads[self.streamed[at]]]

    def step(self) -> None:
        """Append the norm, the optimizer steps and the uploads, in order of use in forward."""
        costs, speeds, program = self.costs, self.costs.speeds, self.program
        on_device = sum(u.device_s for u in self.units if u.placement is Placement.DEVICE)
        norm_s = sum(u.gradient_bytes for u in self.units) / speeds.traffic_bytes_per_s
        norm = self.run("step", on_device + norm_s, [self.compute])
        self.hosts, self.arrivals, self.writes = {}, {}, []
        following = iter(enumerate(self.streamed[len(self.reads) :], len(self.reads)))
        steps: list[int] = []
        fetched = {costs.layers[i].layer.name for i in self.fetched}
        for number, unit in enumerate(self.units):
            if unit.placement is Placement.HOST:
                self.hosts[number] = program.add("host", Queue.HOST, unit.host_s, [norm, *self.downloaded])
                steps.append(self.hosts[number])
                if unit.layer not in fetched:
                    seconds = speeds.copy_s(unit.weight_bytes, speeds.h2d_bytes_per_s)
                    self.arrivals[number] = program.add("upload", Queue.H2D, seconds, [steps[-1]])
            elif unit.placement is Placement.STREAMED:
                self._stream(number, unit, norm, steps[-2:-1])
                at, after = next(following, (0, None))
                if after is not None:
                    self._read(after, self.writes[-1:] if at >= self.slots else [])

    def _stream(self, number: int, unit: Unit, norm: int, pace: Sequence[int]) -> None:
        speeds = self.costs.speeds
        self.arrivals[number] = self.reads[number]
        seconds = speeds.copy_s(unit.state_bytes, speeds.d2h_bytes_per_s)
        self.writes.append(self.program.add("write", Queue.D2H, seconds, [norm, self.reads[number], *pace]))


_SHORTEST_S = 1e-4
"""Waits shorter than this are not reported."""
_HIDDEN = 0.02
"""Share below which exposed time counts as overlapped."""
_TOLD = 0.05
"""Share below which waits are not reported, of the exposed time."""
_TOLD_S = 5e-6
"""Exposed time below this is reported as nothing."""
_MOST_DOUBLINGS = 6
_ROUNDING = 1 - 1e-9
"""Sums in another order differ."""

RESOURCES = {
    Queue.COMPUTE: "GPU",
    Queue.D2H: "D2H copy engine",
    Queue.H2D: "H2D copy engine",
    Queue.HOST: "CPU AdamW",
}
_NAMES = {
    "upload": "CPU AdamW and the H2D copy of weights",
    "host": "CPU AdamW",
    "read": "optimizer state being prefetched",
    "write": "optimizer state being written back",
    "gradient": "gradients being offloaded",
    "offload": "activations being offloaded",
    "reload": "activations being reloaded",
    "fetch": "weights being prefetched",
    "add": "gradients being accumulated on the host",
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Hold the predicted seconds of one step."""

    step_s: float
    compute_s: float
    """Computation on the GPU, with recomputation and its own optimizer step."""
    forward_s: float
    """First microbatch's forward, which overlaps with the work between two steps."""
    backward_s: float
    """Last microbatch's backward."""
    busy_s: Mapping[Queue, float]
    """Work per lane, each alone."""
    waited_s: Mapping[str, float]
    """Seconds for which compute waited, by kind of work."""

    @property
    def exposed_s(self) -> float:
        """Return the seconds for which the GPU is idle because of offloading."""
        return max(0.0, self.step_s - self.compute_s)


def predict(workload: Workload, choice: Choice, speeds: Speeds) -> Prediction:
    """Predict the step of `workload` under `choice`."""
    return predict_of(Costs(workload, speeds), choice, required(workload, choice))


def predict_of(costs: Costs, choice: Choice, needs: Needs) -> Prediction:
    """Predict the step of a choice, for many choices of one workload.

    Args:
        needs: memory needs of the choice.
    """
    microbatches = costs.workload.microbatches
    units = costs.units(choice)
    pair_s, pair_busy_s = _between_s(costs, choice, needs) if microbatches > 2 else (0.0, {})
    step = StepTimeline(costs, choice, needs, units)
    marks = []
    for _ in range(2):
        first = len(step.program.names)
        step.backward(last=True)
        step.step()
        step.forward(first=True)
        if microbatches > 1:
            step.backward(last=False)
            step.forward(first=False)
        if microbatches > 2:
            step.run("middle", (microbatches - 2) * pair_s)
        marks.append((first, len(step.program.names)))
    timeline = run(step.program, costs.speeds.slowdown)
    return _prediction(costs, step.program, timeline, marks, pair_s, pair_busy_s)


def least_s(costs: Costs, choice: Choice, needs: Needs) -> float:
    """Return a lower bound on the seconds of `predict`, where all buckets are of the workload's layers.

    No part of a step is shorter than its compute, nor than what the other lanes do in it: in the last backward until
    the norm is known and all gradients are on the host; from then to the last layer of the next forward; and in each
    microbatch in between.
    """
    workload, layers, lanes = costs.workload, costs.layers, costs.lanes_s
    kept = [costs.kept(i, keep) for i, keep in costs.keep_of(choice).items()]
    reloads_s = sum(cost.reload_s for cost in kept)
    # Forward waits for the copies of as many first layers as offload anything.
    leaving = sum(cost.offload_s > 0 for cost in kept)
    offloads_s = sum(cost.offload_s for cost in kept[:leaving])
    names = choice.offloaded_weights
    fetches = [cost.fetch_s for cost in layers if cost.layer.name in names] if names else []
    # The first ones may begin before the pass does.
    ahead = weight_prefetch_depth(gathered=workload.ranks > 1)
    fetch_s = max(0.0, sum(fetches) - ahead * max(fetches, default=0.0))
    fetch_again_s = fetch_s if workload.fetched_anew else 0.0
    moved = costs.moved(choice)
    forward_s = sum(cost.forward_s for cost in layers)
    backward_s = _computed_s(costs, choice) - forward_s
    backward_s = max(backward_s, reloads_s + fetch_again_s)
    normed_s = backward_s + moved.device_s
    host_begins_s = max(normed_s, lanes(moved.gradients_s, 0.0, moved.added_s))
    read_s = sum(moved.reads_s)
    staged_s = sum(moved.reads_s[: moved.staged(needs.slots)])
    prefetched_s = min(staged_s, max(0.0, host_begins_s - reloads_s - fetch_again_s))
    uploads_s = moved.uploads_s - sum(moved.uploads_by_layer.get(name, 0.0) for name in names)
    to_device_s = uploads_s + fetch_s + read_s - prefetched_s
    behind_s = lanes(moved.writes_s + offloads_s, to_device_s, moved.host_s) + layers[-1].forward_s
    total_s = max(normed_s + forward_s, host_begins_s + behind_s)
    if workload.microbatches > 1:
        summed = choice.gradients_on_host
        between_s = lanes(moved.gradients_between_s, 0.0, moved.added_between_s) if summed else 0.0
        forward_s = max(forward_s, lanes(offloads_s, fetch_again_s, 0.0))
        total_s += (workload.microbatches - 1) * (max(backward_s, between_s) + forward_s)
    return total_s * _ROUNDING


def _computed_s(costs: Costs, choice: Choice) -> float:
    """Return the compute seconds of one microbatch, with the accumulation of its gradients."""
    again = sum(costs.kept(i, keep).again_s for i, keep in costs.keep_of(choice).items())
    computed = sum(c.forward_s + c.backward_s for c in costs.layers)
    return computed + again + sum(costs.numels) * costs.accumulation_s


def _between_s(costs: Costs, choice: Choice, needs: Needs) -> tuple[float, Mapping[Queue, float]]:
    """Return `_middle_s`, cached by what it depends on: placements matter where gradients are offloaded."""
    key = choice.activations, choice.offloaded_weights, choice.placements if choice.gradients_on_host else ()
    if key not in costs.between_s:
        costs.between_s[key] = _middle_s(costs, StepTimeline(costs, choice, needs, costs.units(choice)))
    return costs.between_s[key]


def _middle_s(costs: Costs, step: StepTimeline) -> tuple[float, Mapping[Queue, float]]:
    """Return the seconds of one microbatch among many, not next to a step, and its work per lane, each alone."""
    if not (step.leaving or step.fetched or step.choice.gradients_on_host):
        computed = _computed_s(costs, step.choice)
        return computed, {Queue.COMPUTE: computed}
    ends, first = [], 0
    for _ in range(2):
        first = len(step.program.names)
        step.backward(last=False)
        step.forward(first=False)
        ends.append(step.compute)
    timeline = run(step.program, costs.speeds.slowdown)
    before, after = (timeline.ends_s[e] for e in ends)
    return after - before, busy_s(step.program, first, len(step.program.names))


def _prediction(
    costs: Costs,
    program: Program,
    timeline: Timeline,
    marks: list[tuple[int, int]],
    pair_s: float,
    pair_busy_s: Mapping[Queue, float],
) -> Prediction:
    (_, middle), (_, stop) = marks
    compute = program.lanes[Queue.COMPUTE]
    ends = [max(i for i in compute if i < mark) for mark in (middle, stop)]
    step_s = timeline.ends_s[ends[1]] - timeline.ends_s[ends[0]]
    busy = busy_s(program, middle, stop)
    microbatches = costs.workload.microbatches
    more = microbatches - 2
    waited = _waited(program, timeline, [i for i in compute if i >= ends[0]])
    if more > 0:
        for queue, seconds in pair_busy_s.items():
            busy[queue] += more * seconds
        # The piece "middle" replaces these microbatches, and their waits count as its own.
        busy[Queue.COMPUTE] -= more * pair_s
        stalled = more * (pair_s - pair_busy_s[Queue.COMPUTE])
        if stalled > _SHORTEST_S:
            waited["microbatches in between"] = stalled
    forward = sum(c.forward_s for c in costs.layers)
    names = [i for i in compute if i >= middle and program.names[i].startswith("backward")]
    backward = sum(program.seconds[i] for i in names) / max(1, min(2, microbatches))
    return Prediction(step_s, busy[Queue.COMPUTE], forward, backward, busy, waited)


def _waited(program: Program, timeline: Timeline, compute: list[int]) -> dict[str, float]:
    """Return the seconds for which compute was idle, by the kind of work that ended last before it went on."""
    found: dict[str, float] = {}
    for before, after in pairwise(compute):
        gap = timeline.starts_s[after] - timeline.ends_s[before]
        if gap <= _SHORTEST_S:
            continue
        kind = program.names[max(set(program.waits[after]) - {NOTHING}, key=lambda w: timeline.ends_s[w])]
        name = _NAMES.get(kind, kind)
        found[name] = found.get(name, 0.0) + gap
    return found


def explain(costs: Costs, choice: Choice, prediction: Prediction) -> list[str]:
    """Explain what is exposed and why, and what would overlap it, in sentences."""
    if prediction.exposed_s < _HIDDEN * prediction.step_s:
        rest = f"all but {_told_s(prediction.exposed_s)}" if prediction.exposed_s >= _TOLD_S else "all"
        return [f"{rest} of the offloading overlaps with compute"]
    said = []
    host_s = prediction.busy_s[Queue.HOST]
    if prediction.waited_s.get(_NAMES["upload"], 0.0) >= 0.5 * prediction.exposed_s:
        said.append(f"CPU AdamW {_told_s(host_s)} does not fit within a {_told_s(prediction.forward_s)} forward")
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
    """Find by trials how many tokens per step of one GPU would overlap it."""
    workload = costs.workload
    sequences = workload.microbatch_sequences
    for _ in range(_MOST_DOUBLINGS):
        sequences *= 2
        if _is_hidden(costs, choice, sequences):
            break
    else:
        return f"even {_tokens(workload, sequences)} would not let it overlap, memory aside"
    low, high = sequences // 2, sequences
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (low, middle) if _is_hidden(costs, choice, middle) else (middle, high)
    return f"{_tokens(workload, high)} would let it overlap, memory aside"


def _is_hidden(costs: Costs, choice: Choice, sequences: int) -> bool:
    found = predict(replace(costs.workload, microbatch_sequences=sequences), choice, costs.speeds)
    return found.exposed_s < _HIDDEN * found.step_s


def _tokens(workload: Workload, sequences: int) -> str:
    """Describe a step with `sequences` sequences in each of its microbatches."""
    among = f"in {workload.microbatches} microbatches" if workload.microbatches > 1 else "in one microbatch"
    tokens = sequences * workload.microbatches * workload.sequence_tokens
    count = f"{tokens / 1024:.0f} K" if tokens >= 1024 else str(tokens)
    return f"{count} tokens per step{' and GPU' if workload.ranks > 1 else ''} {among}"
