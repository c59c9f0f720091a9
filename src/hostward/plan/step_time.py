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

from hostward.core.placement import Placement
from hostward.plan.cost_model import LAYERS_IN_FLIGHT, Costs, Speeds
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.lane_simulator import Program, Queue, Timeline, run
from hostward.plan.memory_model import Needs, required
from hostward.plan.workload import Workload
from hostward.schedule.activations import FIRST_GROUP_BYTES
from hostward.schedule.optimizer import LANDING_BUFFERS
from hostward.schedule.staging import MIN_STAGING_BUFFERS
from hostward.schedule.weights import weight_prefetch_depth

_COMPUTE, _D2H, _H2D, _HOST = map(int, Queue)


class StepTimeline:
    """Append the parts of a step to a program, with the work that each waits for across parts.

    A step begins with its last backward. What that waits for of the step before, whose numbers are not known yet, is
    filled in by `close`.

    Args:
        needs: of the choice: GPU staging buffers of streamed buckets, and when they are acquired.
    """

    def __init__(self, costs: Costs, choice: Choice, needs: Needs) -> None:
        self.costs, self.choice = costs, choice
        self.program = Program()
        self.keep = costs.keep_of(choice)
        self.moved = costs.moved(choice)
        self.leaving = [i for i in costs.repeated if self.keep[i] in LEAVES]
        self.window = max(1, len(costs.repeated) - len(self.leaving))
        self._ahead = weight_prefetch_depth(gathered=costs.workload.ranks > 1)
        names = choice.offloaded_weights
        self.fetched = {i for i, c in enumerate(costs.layers) if c.layer.name in names} if names else set[int]()
        self.slots = self.moved.staged(needs.slots)
        self._staged_layers = [costs.layer_of_bucket(bucket) for bucket in needs.stage_at] if self.slots else []
        # Work of each kind, the newest last.
        self.computes: list[int] = []
        self.offloads: dict[int, list[int]] = {i: [] for i in self.leaving}
        self.hosts: dict[str, list[int]] = {}
        """CPU optimizer steps by layer."""
        self.guesses: dict[str, list[int]] = {}
        """Those during backward, by layer, in order of backward."""
        self.arrivals: dict[str, list[int]] = {}
        """Copies of weights and of state to the device, by layer."""
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.downloaded: list[int] = []
        self.added: list[int] = []
        self._reading_s = 0.0
        """Seconds of the last backward until the staged state has been read."""
        self._of_before: list[tuple[list[int], list[int], int]] = []
        """Waits for work of the step before, the list that has it, and its place from the end of that."""

    def close(self) -> Program:
        """Return the program, to be run in rounds."""
        count = len(self.program.seconds)
        for waits, made, place in self._of_before:
            if -place <= len(made):
                waits.append(made[place] - count)
        return self.program

    def _newest(self, waits: list[int], made: list[int], place: int = -1) -> list[int]:
        """Return the waits, with the work at this place from the end of what has been made."""
        if -place <= len(made):
            waits.append(made[place])
        else:
            self._of_before.append((waits, made, place + len(made)))
        return waits

    def run(self, name: str, seconds: float, waits: Sequence[int] = ()) -> None:
        """Append work of the GPU."""
        self.computes.append(self.program.add(name, Queue.COMPUTE, seconds, waits))

    # ------------------------------------------------------------------ parts

    def forward(self, *, first: bool) -> None:
        """Append a forward.

        Args:
            first: whether it follows a step, so that its layers wait for their weights.
        """
        costs, add, computes = self.costs, self.program.add, self.computes
        anew, last, place = costs.workload.fetched_anew, len(costs.layers) - 1, 0
        for i, cost in enumerate(costs.layers):
            waits = list(self.arrivals.get(cost.layer.name, ())) if first else []
            if first and i == last:  # staging buffers are released before the last layer, after the last write
                waits += self.writes[-1:]
            if i in self.fetched and (first or anew):
                waits.append(self._fetch(i, first=first))
            if cost.layer.repeated:
                if place >= self.window:
                    waits += self.offloads.get(costs.repeated[place - self.window], ())[-1:]
                place += 1
            before = computes[-1:]
            computes.append(add("forward", _COMPUTE, cost.forward_s, waits))
            if i in self.offloads:
                keep = self.keep[i]
                # An input exists when the layer begins, and is offloaded then if it fills a group of its own.
                at_once = keep is Keep.RECOMPUTE_OFFLOAD and cost.held_bytes(keep) >= FIRST_GROUP_BYTES
                after = [*before, *waits] if at_once else computes[-1:]
                self.offloads[i].append(add("offload", _D2H, costs.kept(i, keep).offload_s, after))

    def _fetch(self, i: int, *, first: bool = False) -> int:
        """Prefetch the offloaded weights of a layer while its predecessor runs; parts of them one layer earlier."""
        cost = self.costs.layers[i]
        # Issued in that layer's pre-forward hook: its start cannot be a wait, the end of the layer before can.
        waits = self._newest([], self.computes, -1 - self._ahead)
        if first:
            waits += self.hosts.get(cost.layer.name, ())
        return self.program.add("fetch", _H2D, cost.fetch_s, waits)

    def backward(self, *, last: bool) -> None:
        """Append a backward.

        Args:
            last: whether it is the step's last microbatch, during which gradients are offloaded and state is
                prefetched.
        """
        costs, add, computes, on_host = self.costs, self.program.add, self.computes, self.choice.gradients_on_host
        copies = costs.gradient_copies(self.choice) if last or on_host else {}
        added, newest, backward_s, anew = self.added, self._newest, self._backward_s, costs.workload.fetched_anew
        reloads: dict[int, int] = {}
        waiting = self.leaving[: max(0, len(costs.repeated) - self.window)]
        place = len(costs.repeated)
        downloaded: list[int] = []
        left_before: list[Sequence[int]] = [()] * LAYERS_IN_FLIGHT
        began_s = left_s = sum(backward_s)
        for i in reversed(range(len(costs.layers))):
            cost = costs.layers[i]
            if cost.layer.repeated:
                place -= 1
                while waiting and costs.place_of[waiting[-1]] >= place - self.window:
                    u = waiting.pop()
                    waits = newest(newest([], computes), self.offloads[u])
                    reloads[u] = add("reload", _H2D, costs.kept(u, self.keep[u]).reload_s, waits)
            if last and len(self.reads) < self.slots:
                self._stage(i, began_s, began_s - left_s)
            left_s -= backward_s[i]
            waits = [*left_before[-LAYERS_IN_FLIGHT]]
            if i in reloads:
                waits.append(reloads[i])
            if anew and i in self.fetched:
                waits.append(self._fetch(i))
            computes.append(computed := add("backward", _COMPUTE, backward_s[i], waits))
            for copy_s, then_s in copies.get(cost.layer.name, ()):
                waits = newest([computed], added, -LANDING_BUFFERS) if on_host else [computed]
                downloaded = [add("gradient", _D2H, copy_s, waits)]
                if on_host:
                    added.append(add("add", _HOST, then_s, downloaded))
                elif then_s:
                    self.guesses.setdefault(cost.layer.name, []).append(add("guess", _HOST, then_s, downloaded))
            left_before.append(downloaded)
        self.downloaded = downloaded

    @cached_property
    def _backward_s(self) -> Sequence[float]:
        """Return the compute seconds of each layer's backward."""
        costs, keep = self.costs, self.keep
        return [
            cost.backward_s + costs.kept(i, keep.get(i, Keep.KEEP)).again_s + accumulated_s
            for i, (cost, accumulated_s) in enumerate(zip(costs.layers, costs.accumulated_s, strict=True))
        ]

    def _read(self, waits: Sequence[int]) -> float:
        """Append the read of the next streamed unit, and return its seconds."""
        seconds = self.moved.streamed[len(self.reads)].read_s
        self.reads.append(self.program.add("read", _H2D, seconds, waits))
        return seconds

    def _stage(self, layer: int, whole_s: float, passed_s: float) -> None:
        """Prefetch state before a layer's backward, as far as buffers and the rest of backward allow.

        Args:
            whole_s, passed_s: seconds of the whole backward, and until that of the layer.
        """
        count = len(self._staged_layers)
        while (at := len(self.reads)) < self.slots:
            room = self._staged_layers[at * count // self.slots] >= layer
            if not room or (at >= MIN_STAGING_BUFFERS and self._reading_s >= whole_s):
                break
            self._reading_s = max(self._reading_s, passed_s)
            self._reading_s += self._read(self._newest(self._newest([], self.computes), self.writes))

    def step(self) -> None:
        """Append the norm, the optimizer steps and the uploads, in order of use in forward."""
        moved, add = self.moved, self.program.add
        self.run("step", moved.device_s)
        norm = self.computes[-1]
        begins, on_host = [norm, *self.downloaded], Placement.HOST
        streamed = 0
        for unit, guessed in zip(moved.offloaded, moved.guessed, strict=True):
            arrivals = self.arrivals.setdefault(unit.layer, [])
            if guessed:
                arrivals.append(add("upload", _H2D, unit.upload_s, [norm, self.guesses[unit.layer].pop()]))
            elif unit.placement is on_host:
                stepped = add("host", _HOST, unit.host_s, begins)
                self.hosts.setdefault(unit.layer, []).append(stepped)
                if unit.layer not in self.choice.offloaded_weights:
                    arrivals.append(add("upload", _H2D, unit.upload_s, [stepped]))
            else:
                read = self.reads[streamed]
                arrivals.append(read)
                self.writes.append(add("write", _D2H, unit.write_s, [norm, read]))
                streamed += 1
                if (at := len(self.reads)) < len(moved.streamed):
                    self._read(self.writes[-1:] if at >= self.slots else ())


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
    "guess": "CPU AdamW during backward",
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
    pair_s, pair_busy_s = _between_s(costs, choice, needs) if microbatches > 2 else (0.0, {})
    step = StepTimeline(costs, choice, needs)
    step.backward(last=True)
    step.step()
    step.forward(first=True)
    if microbatches > 1:
        step.backward(last=False)
        step.forward(first=False)
    if microbatches > 2:
        step.run("middle", (microbatches - 2) * pair_s)
    program = step.close()
    timeline = run(program, costs.speeds.slowdown, rounds=2)
    return _prediction(costs, program, timeline, pair_s, pair_busy_s)


def least_s(costs: Costs, choice: Choice, needs: Needs, *, simulated: bool = False) -> float:
    """Return a lower bound on the seconds of `predict`, where all buckets are of the workload's layers.

    No part of a step is shorter than its compute, nor than what the other lanes do in it: in the last backward until
    the norm is known and all gradients are on the host; from then to the last layer of the next forward; and in each
    microbatch in between.

    Args:
        simulated: the microbatches that are not next to a step count with their predicted seconds, which takes a
            simulation of one of them.
    """
    workload, layers, lanes = costs.workload, costs.layers, costs.lanes_s
    again_s, offloads_s, reloads_s = costs.activations_s(choice.activations)
    names = choice.offloaded_weights
    fetches = [cost.fetch_s for cost in layers if cost.layer.name in names] if names else []
    # The first ones may begin before the pass does.
    ahead = weight_prefetch_depth(gathered=workload.ranks > 1)
    fetch_s = max(0.0, sum(fetches) - ahead * max(fetches, default=0.0))
    fetch_again_s = fetch_s if workload.fetched_anew else 0.0
    moved, forward_s = costs.moved(choice), costs.forward_s
    backward_s = max(costs.backward_s + again_s, reloads_s + fetch_again_s)
    normed_s = backward_s + moved.device_s
    host_begins_s = max(normed_s, lanes(moved.gradients_s, 0.0, moved.added_s))
    staged_s = sum([unit.read_s for unit in moved.streamed[: moved.staged(needs.slots)]])
    prefetched_s = min(staged_s, max(0.0, host_begins_s - reloads_s - fetch_again_s))
    uploads_s = moved.uploads_s - sum([moved.uploads_by_layer.get(name, 0.0) for name in names])
    to_device_s = uploads_s + moved.reads_s - prefetched_s
    stepped_s = moved.host_s + max(0.0, moved.guessed_s - host_begins_s)
    behind_s = lanes(moved.writes_s + offloads_s, to_device_s + fetch_s, stepped_s) + layers[-1].forward_s
    if names and to_device_s > 0.0:
        behind_s = max(behind_s, _fetched_after_s(costs, choice, needs, uploads_s, to_device_s))
    total_s = max(normed_s + forward_s, host_begins_s + behind_s)
    if workload.microbatches > 1:
        summed = choice.gradients_on_host
        between_s = lanes(moved.gradients_between_s, 0.0, moved.added_between_s) if summed else 0.0
        forward_s = max(forward_s, lanes(offloads_s, fetch_again_s, 0.0))
        pair_s = max(backward_s, between_s) + forward_s
        total_s += (workload.microbatches - 1) * pair_s
        if simulated and workload.microbatches > 2:
            total_s += (workload.microbatches - 2) * (_between_s(costs, choice, needs)[0] - pair_s)
    return total_s * _ROUNDING


def _fetched_after_s(costs: Costs, choice: Choice, needs: Needs, uploads_s: float, to_device_s: float) -> float:
    """Return a lower bound on the seconds from the norm to the end of forward, where weights are offloaded.

    They are prefetched after all uploads and reads, which come first on their lane, and forward goes on from there. The
    last upload waits for the CPU optimizer steps before it, and the last read for all writes but as many as there are
    staging buffers.

    Args:
        uploads_s, to_device_s: seconds of uploads, and of them and the reads that are not done before the norm.
    """
    moved, names = costs.moved(choice), choice.offloaded_weights
    host_s = moved.host_s if uploads_s else 0.0
    if uploads_s:
        for unit, guessed in zip(reversed(moved.offloaded), reversed(moved.guessed), strict=True):
            if unit.placement is Placement.HOST and not guessed:
                if unit.layer not in names:
                    break
                host_s -= unit.host_s
    written_s = moved.writes_s - sum([unit.write_s for unit in moved.streamed[-moved.staged(needs.slots) :]])
    places = [i for i, cost in enumerate(costs.layers) if cost.layer.name in names]
    fetch_s, after_s = 0.0, 0.0
    for i in places:
        fetch_s += costs.layers[i].fetch_s
        after_s = max(after_s, fetch_s + costs.forward_from_s[i])
    return costs.lanes_s(max(0.0, written_s), to_device_s, max(0.0, host_s)) + after_s


def _between_s(costs: Costs, choice: Choice, needs: Needs) -> tuple[float, Mapping[Queue, float]]:
    """Return `_middle_s`, cached by what it depends on: placements matter where gradients are offloaded."""
    key = choice.activations, choice.offloaded_weights, choice.placements if choice.gradients_on_host else ()
    if key not in costs.between_s:
        costs.between_s[key] = _middle_s(costs, StepTimeline(costs, choice, needs))
    return costs.between_s[key]


def _middle_s(costs: Costs, step: StepTimeline) -> tuple[float, Mapping[Queue, float]]:
    """Return the seconds of one microbatch among many, not next to a step, and its work per lane, each alone."""
    if not (step.leaving or step.fetched or step.choice.gradients_on_host):
        computed = costs.forward_s + costs.backward_s + costs.activations_s(step.choice.activations)[0]
        return computed, {Queue.COMPUTE: computed}
    step.backward(last=False)
    step.forward(first=False)
    program = step.close()
    ends_s, last = run(program, costs.speeds.slowdown, rounds=2).ends_s, step.computes[-1]
    return ends_s[len(program.seconds) + last] - ends_s[last], program.busy_s()


def _prediction(
    costs: Costs, program: Program, timeline: Timeline, pair_s: float, pair_busy_s: Mapping[Queue, float]
) -> Prediction:
    compute, count = program.lanes[Queue.COMPUTE], len(program.seconds)
    step_s = timeline.ends_s[count + compute[-1]] - timeline.ends_s[compute[-1]]
    busy = program.busy_s()
    microbatches = costs.workload.microbatches
    more = microbatches - 2
    waited = _waited(program, timeline)
    if more > 0:
        for queue, seconds in pair_busy_s.items():
            busy[queue] += more * seconds
        # The piece "middle" replaces these microbatches, and their waits count as its own.
        busy[Queue.COMPUTE] -= more * pair_s
        stalled = more * (pair_s - pair_busy_s[Queue.COMPUTE])
        if stalled > _SHORTEST_S:
            waited["microbatches in between"] = stalled
    backward = sum([program.seconds[i] for i in compute if program.names[i] == "backward"])
    return Prediction(
        step_s, busy[Queue.COMPUTE], costs.forward_s, backward / max(1, min(2, microbatches)), busy, waited
    )


def _waited(program: Program, timeline: Timeline) -> dict[str, float]:
    """Return the seconds for which compute was idle in the second round, by the kind of work that ended last before it
    went on.
    """
    found: dict[str, float] = {}
    compute, count = program.lanes[Queue.COMPUTE], len(program.seconds)
    before = timeline.ends_s[compute[-1]]
    for number in compute:
        gap = timeline.starts_s[count + number] - before
        before = timeline.ends_s[count + number]
        if gap > _SHORTEST_S:
            kind = program.names[max(program.waits[number], key=lambda w: timeline.ends_s[count + w])]
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
        within = f"a {_told_s(prediction.forward_s)} forward"
        if costs.workload.step_early:
            within = f"backward and forward, {_told_s(prediction.backward_s + prediction.forward_s)}"
        said.append(f"CPU AdamW {_told_s(host_s)} does not fit within {within}")
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
        return f"even with {_tokens(workload, sequences)} the offloading would not overlap fully with compute"
    low, high = sequences // 2, sequences
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (low, middle) if _is_hidden(costs, choice, middle) else (middle, high)
    return f"with {_tokens(workload, high)} the offloading would overlap with compute, if they fit"


def _is_hidden(costs: Costs, choice: Choice, sequences: int) -> bool:
    found = predict(replace(costs.workload, microbatch_sequences=sequences), choice, costs.speeds)
    return found.exposed_s < _HIDDEN * found.step_s


def _tokens(workload: Workload, sequences: int) -> str:
    """Describe a step with `sequences` sequences in each of its microbatches."""
    among = f"in {workload.microbatches} microbatches" if workload.microbatches > 1 else "in one microbatch"
    tokens = sequences * workload.microbatches * workload.sequence_tokens
    count = f"{tokens / 1024:.0f} K" if tokens >= 1024 else str(tokens)
    return f"{count} tokens per step{' and GPU' if workload.ranks > 1 else ''} {among}"
