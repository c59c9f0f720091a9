"""The optimizer step of a plan as a schedule.

    compute   model ─ norm ─┬─ step of device buckets ──────────────┬─ join
    d2h                     └─ fetch scalars, gradient/0, 1, 2, ... │
    host                           └─ step/0, retire/0, step/1, ... │
    h2d                                 └─ weight/0, weight/1, ... ─┘

`model` stands for the caller's own forward and backward, which read the weights and make the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostward.ordering import repeated, require_ordered, without_redundant_waits
from hostward.plan import Placement
from hostward.schedule import Kind, Lane, Op, Schedule

DEVICE_SCALARS = "scalars.device"
HOST_SCALARS = "scalars.host"


def lower_step(placements: Sequence[Placement]) -> Schedule:
    """The schedule of one step; `placements[b]` is that of bucket b, in order of use in forward.

    `join` also waits for the last host function, so that the next step may write the landing places again. The
    ordering rule is run on two steps in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    everything = range(len(placements))
    on_host = [b for b in everything if placements[b] is Placement.HOST]
    gradients = tuple(f"gradient/{b}" for b in everything)
    weights = tuple(f"weight/{b}" for b in everything)
    ops = [
        Op("model", Kind.MODEL, Lane.COMPUTE, reads=weights, writes=gradients),
        Op("norm", Kind.NORM, Lane.COMPUTE, reads=gradients, writes=(DEVICE_SCALARS,)),
    ]
    if on_host:
        ops.append(
            Op("fetch", Kind.COPY, Lane.D2H, reads=(DEVICE_SCALARS,), writes=(HOST_SCALARS,), waits=("norm",)),
        )
    for b in everything:
        ops += _host_bucket(b) if placements[b] is Placement.HOST else [_device_bucket(b)]
    last = [f"retire/{b}" for b in on_host[-1:]]
    waits = (*(f"upload/{b}" for b in on_host), *last)
    ops.append(Op("join", Kind.JOIN, Lane.COMPUTE, reads=weights, waits=waits))
    schedule = without_redundant_waits(Schedule(tuple(ops)))
    require_ordered(repeated(schedule, 2))
    return schedule


def _device_bucket(b: int) -> Op:
    return Op(
        f"step/{b}",
        Kind.ADAMW,
        Lane.COMPUTE,
        bucket=b,
        reads=(f"gradient/{b}", DEVICE_SCALARS),
        writes=(f"state/{b}", f"weight/{b}"),
    )


def _host_bucket(b: int) -> list[Op]:
    landing, source = f"landing/{b}", f"source/{b}"
    return [
        Op(
            f"download/{b}",
            Kind.COPY,
            Lane.D2H,
            bucket=b,
            reads=(f"gradient/{b}",),
            writes=(landing,),
            waits=("norm",),
        ),
        Op(
            f"step/{b}",
            Kind.ADAMW,
            Lane.HOST,
            bucket=b,
            reads=(landing, HOST_SCALARS),
            writes=(f"state/{b}", source),
            waits=("fetch", f"download/{b}"),
        ),
        Op(
            f"upload/{b}",
            Kind.COPY,
            Lane.H2D,
            bucket=b,
            reads=(source,),
            writes=(f"weight/{b}",),
            waits=("norm", f"step/{b}"),
        ),
        Op(f"retire/{b}", Kind.RETIRE, Lane.HOST, bucket=b, writes=(landing,)),
    ]
