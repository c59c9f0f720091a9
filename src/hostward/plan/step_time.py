"""Predict the seconds of a training step, for a workload, a choice and a machine. Pure arithmetic; no torch.

A step is simulated as work on four lanes (`hostward.plan.lane_simulator`): compute, both directions of PCIe or NVLink,
and the CPU optimizer step. Two consecutive steps are simulated and the second counts, so that work which continues into
the next step is counted. Each step follows the schedules of `hostward.schedule` as far as they take time, in the same
order on each lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hostward.core.placement import HOST_STEP_BYTES, Placement
from hostward.plan.cost_model import SUM_BYTES, Costs, Speeds, Unit
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.lane_simulator import Program, Queue, Timeline, busy_s, run
from hostward.plan.memory_model import Needs, required
from hostward.plan.workload import Workload
from hostward.schedule.activations import FIRST_GROUP_BYTES
from hostward.schedule.optimizer import LANDING_BUFFERS
from hostward.schedule.staging import MIN_STAGING_BUFFERS
from hostward.schedule.weights import weight_prefetch_depth

_IN_FLIGHT = 2
"""Layers after which the memory of gradients that are being offloaded is needed again."""


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
        self.by_layer: dict[str, list[int]] = {}
        for number, unit in enumerate(self.units):
            self.by_layer.setdefault(unit.layer, []).append(number)
        self.streamed = [i for i, u in enumerate(self.units) if u.placement is Placement.STREAMED]
        leaving = [i for i in costs.repeated if self.keep[i] in LEAVES]
        self.leaving = leaving
        self.window = max(1, len(costs.repeated) - len(leaving))
        self._ahead = weight_prefetch_depth(gathered=costs.workload.ranks > 1)
        self.fetched = [i for i, c in enumerate(costs.layers) if c.layer.name in choice.offloaded_weights]
        self.slots = self._units_staged(needs.slots)
        self._staged_layers = [self._layer_of(bucket) for bucket in needs.stage_at]
        # Newest work of each kind, by unit or layer.
        self.compute: int | None = None
        self.offloads: dict[int, int] = {}
        self.hosts: dict[int, int] = {}
        self.arrivals: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        self._began_s = self._reading_s = 0.0
        """Seconds taken by the last backward, and those of it until the staged state has been read."""
        self.writes: list[int] = []
        self.downloaded: list[int] = []
        self.added: list[int] = []

    def _units_staged(self, slots: int) -> int:
        """Return the number of streamed units that fit in the staging buffers, each for the largest streamed bucket."""
        if not self.streamed:
            return 0
        buckets = zip(self.costs.workload.inventory.buckets, self.choice.placements, strict=True)
        slot_bytes = max(bucket.state_bytes for bucket, p in buckets if p is Placement.STREAMED)
        largest = max(self.units[i].state_bytes for i in self.streamed)
        return max(1, min(len(self.streamed), slots * slot_bytes // largest))

    def _layer_of(self, bucket: int) -> int:
        """Return the layer of a bucket; the first layer where none has that name, as a caller may name layers
        otherwise.
        """
        names = [cost.layer.name for cost in self.costs.layers]
        layers = [b.layer for b in self.costs.workload.inventory.buckets[bucket : bucket + 1]]
        return names.index(layers[0]) if layers and layers[0] in names else 0

    def _of(self, layer: int) -> Sequence[int]:
        return self.by_layer.get(self.costs.layers[layer].layer.name, ())

    # ------------------------------------------------------------------ parts

    def forward(self, *, first: bool) -> None:
        """Append a forward.

        Args:
            first: whether it follows a step, so that its layers wait for their weights.
        """
        anew = self.costs.workload.fetched_anew
        for i, cost in enumerate(self.costs.layers):
            waits: list[int | None] = []
            if first:
                waits += [self.arrivals[u] for u in self._of(i) if u in self.arrivals]
                # Staging buffers are released before the last layer, after the last write.
                waits += self.writes[-1:] if i == len(self.costs.layers) - 1 else []
            waits += [self._fetch(i)] if first or anew else []
            if cost.layer.repeated:
                before = self.costs.repeated.index(i) - self.window
                waits += [self.offloads.get(self.costs.repeated[before])] if before >= 0 else []
            before_it = self.compute
            self.compute = self.program.add(f"forward/{cost.layer.name}", Queue.COMPUTE, cost.forward_s, waits)
            if i in self.leaving:
                speeds = self.costs.speeds
                size = cost.held_bytes(self.keep[i])
                # An input exists when the layer begins, and is offloaded then if it fills a group of its own.
                at_once = self.keep[i] is Keep.RECOMPUTE_OFFLOAD and size >= FIRST_GROUP_BYTES
                self.offloads[i] = self.program.add(
                    "offload",
                    Queue.D2H,
                    speeds.copy_s(size, speeds.d2h_bytes_per_s),
                    [before_it, *waits] if at_once else [self.compute],
                )

    def _fetch(self, i: int) -> int | None:
        """Prefetch the offloaded weights of a layer while its predecessor runs; parts of them one layer earlier."""
        if i not in self.fetched:
            return None
        # Issued in that layer's pre-forward hook: its start cannot be a wait, the end of the layer before can.
        entered = self.compute
        for _ in range(self._ahead):
            entered = None if entered is None else self._previous_compute(entered)
        steps = [self.hosts[u] for u in self._of(i) if u in self.hosts]
        speeds = self.costs.speeds
        seconds = speeds.copy_s(self.costs.layers[i].layer.weight_bytes, speeds.h2d_bytes_per_s)
        return self.program.add("fetch", Queue.H2D, seconds, [entered, *steps])

    def _previous_compute(self, number: int) -> int | None:
        works = self.program.works
        return next((i for i in reversed(range(number)) if works[i].queue is Queue.COMPUTE), None)

    def backward(self, *, last: bool) -> None:
        """Append a backward.

        Args:
            last: whether it is the step's last microbatch, during which gradients are offloaded and state is
                prefetched.
        """
        costs, speeds = self.costs, self.costs.speeds
        reloads: dict[int, int] = {}
        released = self.leaving[: max(0, len(costs.repeated) - self.window)]
        waiting = list(released)
        downloads: list[int] = []
        left_before: list[int | None] = [None] * _IN_FLIGHT
        leaves = last or self.choice.gradients_on_host
        each_s = [self._backward_s(i) for i in range(len(costs.layers))]
        left_s = sum(each_s)
        for i in reversed(range(len(costs.layers))):
            if costs.layers[i].layer.repeated:
                limit = costs.repeated.index(i) - self.window
                while waiting and costs.repeated.index(waiting[-1]) >= limit:
                    u = waiting.pop()
                    size = costs.layers[u].held_bytes(self.keep[u])
                    reloads[u] = self.program.add(
                        "reload",
                        Queue.H2D,
                        speeds.copy_s(size, speeds.h2d_bytes_per_s),
                        [self.compute, self.offloads.get(u)],
                    )
            if last:
                self._stage(i, left_s)
            cost = costs.layers[i]
            units = [u for u in self._of(i) if self.units[u].placement is Placement.HOST]
            seconds = each_s[i]
            left_s -= seconds
            fetch = self._fetch(i) if costs.workload.fetched_anew else None
            waits = [reloads.get(i), fetch, left_before[-_IN_FLIGHT]]
            self.compute = self.program.add(f"backward/{cost.layer.name}", Queue.COMPUTE, seconds, waits)
            for u in reversed(units if leaves else []):
                unit = self.units[u]  # accumulated gradients are offloaded as they are, summands as they come
                as_made = self.choice.gradients_on_host and not costs.workload.reduced_in_fp32
                size = unit.weight_bytes if as_made else unit.gradient_bytes
                copy_s = speeds.copy_s(size, speeds.d2h_bytes_per_s)
                landing_free = self.added[-LANDING_BUFFERS : 1 - LANDING_BUFFERS]
                downloads.append(self.program.add("gradient", Queue.D2H, copy_s, [self.compute, *landing_free]))
                if self.choice.gradients_on_host:
                    added_s = (size + 2 * SUM_BYTES * unit.numel) / HOST_STEP_BYTES / speeds.host_parameters_per_s
                    self.added.append(self.program.add("add", Queue.HOST, added_s, [downloads[-1]]))
            left_before.append(downloads[-1] if downloads else None)
        self.downloaded = downloads[-1:]

    def _backward_s(self, i: int) -> float:
        cost = self.costs.layers[i]
        numel = sum(self.units[u].numel for u in self._of(i))
        return cost.backward_s + cost.again_s(self.keep.get(i, Keep.KEEP)) + numel * self.costs.accumulation_s

    def _read(self, u: int, waits: Sequence[int | None]) -> None:
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
            self._reading_s += self.program.works[self.reads[self.streamed[at]]].seconds

    def step(self) -> None:
        """Append the norm, the optimizer steps and the uploads, in order of use in forward."""
        costs, speeds, program = self.costs, self.costs.speeds, self.program
        on_device = sum(u.device_s for u in self.units if u.placement is Placement.DEVICE)
        norm_s = sum(u.gradient_bytes for u in self.units) / speeds.traffic_bytes_per_s
        norm = self.compute = program.add("step", Queue.COMPUTE, on_device + norm_s, [self.compute])
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
    pair_s, pair_busy_s = _middle_s(costs, StepTimeline(costs, choice, needs, units)) if microbatches > 2 else (0.0, {})
    step = StepTimeline(costs, choice, needs, units)
    marks = []
    for _ in range(2):
        first = len(step.program.works)
        step.backward(last=True)
        step.step()
        step.forward(first=True)
        if microbatches > 1:
            step.backward(last=False)
            step.forward(first=False)
        if microbatches > 2:
            step.compute = step.program.add("middle", Queue.COMPUTE, (microbatches - 2) * pair_s)
        marks.append((first, len(step.program.works)))
    timeline = run(step.program, costs.speeds.slowdown)
    return _prediction(costs, step.program, timeline, marks, pair_s, pair_busy_s)


def least_s(costs: Costs, choice: Choice) -> float:
    """Return a lower bound on the seconds of `predict`, where all buckets are of the workload's layers.

    The bound is compute alone, plus the work of CPU or PCIe between a step and the end of the next forward.
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
    """Return the compute seconds of one microbatch, with the accumulation of its gradients."""
    again = sum(costs.layers[i].again_s(keep) for i, keep in keeps.items())
    computed = sum(c.forward_s + c.backward_s for c in costs.layers)
    return computed + again + sum(costs.numels) * costs.accumulation_s


def _middle_s(costs: Costs, step: StepTimeline) -> tuple[float, Mapping[Queue, float]]:
    """Return the seconds of one microbatch among many, not next to a step, and its work per lane, each alone."""
    if not (step.leaving or step.fetched or step.choice.gradients_on_host):
        computed = _computed_s(costs, step.keep)
        return computed, {Queue.COMPUTE: computed}
    ends, first = [], 0
    for _ in range(2):
        first = len(step.program.works)
        step.backward(last=False)
        step.forward(first=False)
        ends.append(step.compute)
    timeline = run(step.program, costs.speeds.slowdown)
    before, after = (timeline.ends_s[e] for e in ends if e is not None)
    return after - before, busy_s(step.program, first, len(step.program.works))


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
        # The piece "middle" replaces these microbatches, and their waits count as its own.
        busy[Queue.COMPUTE] -= more * pair_s
        stalled = more * (pair_s - pair_busy_s[Queue.COMPUTE])
        if stalled > _SHORTEST_S:
            waited["microbatches in between"] = stalled
    forward = sum(c.forward_s for c in costs.layers)
    names = [i for i in compute if i >= middle and program.works[i].name.startswith("backward")]
    backward = sum(program.works[i].seconds for i in names) / max(1, min(2, microbatches))
    return Prediction(step_s, busy[Queue.COMPUTE], forward, backward, busy, waited)


def _waited(program: Program, timeline: Timeline, compute: list[int]) -> dict[str, float]:
    """Return the seconds for which compute was idle, by the kind of work that ended last before it went on."""
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
