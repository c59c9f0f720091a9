"""Host memory that comes and goes in every step is locked once.

Seen red: blocks that are not reused, slabs that serve only blocks of their first size, memory that a finaliser's block
gives back twice, a limit that counts what is free, a block handed on without the event of its last use, memory that is
never given back.
"""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import given, strategies as st

from hostward.errors import MemoryLimitError, ModelError
from hostward.runtime.backend import Event, Tier
from hostward.runtime.pinned_arena import Block, HostArena
from hostward.runtime.simulated.backend import Order, SimulatedBackend

KIB = 1024


def arena(**options: object) -> HostArena:
    return HostArena(SimulatedBackend(threads=1, order=Order(eager=True)), "test", **options)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 5 * KIB), st.booleans()), max_size=60))
def test_blocks_in_use_never_overlap(requests: list[tuple[int, bool]]) -> None:
    """Whatever is taken and given back in whatever order."""
    memory, held = arena(), list[Block]()
    for size_bytes, give in requests:
        block = memory.take(size_bytes)
        assert block.buffer.nbytes >= size_bytes
        held.append(block)
        if give:
            memory.give(held.pop(len(held) // 2), None)
        spans = sorted((b.buffer.data.data_ptr(), b.buffer.nbytes) for b in held if b.buffer.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert memory.blocks_in_use == len(held)
    assert memory.slab_bytes == memory.backend.ledger.by_owner(Tier.HOST).get("test", 0)


def test_steps_with_the_same_sizes_lock_nothing_after_the_first() -> None:
    memory, sizes = arena(), (3 * KIB, KIB, 7 * KIB, KIB)
    for _ in range(4):
        blocks = [memory.take(n) for n in sizes]
        for block in blocks:
            memory.give(block, None)
        memory.rest()
        assert memory.slabs_made == len(sizes)
        assert memory.slab_bytes == sum(sizes)


@given(st.lists(st.lists(st.integers(1, 5 * KIB), max_size=8), min_size=1, max_size=40), st.booleans())
def test_steps_of_other_sizes_use_the_same_memory(steps: list[list[int]], retain: bool) -> None:
    """Whatever the sizes, little more is held than the largest step so far has needed."""
    memory, most = arena(retain=retain), 0
    for sizes in steps:
        blocks = [memory.take(n) for n in sizes]
        most = max(most, sum(b.buffer.nbytes for b in blocks))
        for block in blocks:
            memory.give(block, None)
        memory.rest()
        assert memory.slab_bytes <= 1.25 * most


def test_slabs_that_have_grown_together_become_one() -> None:
    memory = arena()
    for size_bytes in (KIB, 2 * KIB, 3 * KIB, 4 * KIB, 4 * KIB):
        memory.give(memory.take(size_bytes), None)
        memory.rest()
    assert memory.slab_bytes == 4 * KIB
    made = memory.slabs_made
    for _ in range(10):
        for block in [memory.take(KIB) for _ in range(4)]:
            memory.give(block, None)
        memory.rest()
    assert memory.slabs_made == made


def test_h21_a_block_is_handed_on_with_the_event_of_its_last_use() -> None:
    memory, event = arena(), Event()
    block = memory.take(KIB)
    assert block.after is None
    memory.give(block, event)
    assert memory.take(KIB).after is event


def test_a_limit_is_kept_and_nothing_is_lost() -> None:
    memory = arena(limit_bytes=4 * KIB)
    first = memory.take(3 * KIB)
    with pytest.raises(MemoryLimitError, match="test: 5,120 bytes of host memory needed"):
        memory.take(2 * KIB)
    assert memory.blocks_in_use == 1
    memory.give(first, None)
    assert memory.take(3 * KIB).buffer.data.data_ptr() == first.buffer.data.data_ptr()


@pytest.mark.parametrize("retain", [True, False])
def test_what_eight_steps_have_not_needed_goes_back(retain: bool) -> None:
    memory = arena(retain=retain)
    for size_bytes in (64 * KIB, *[4 * KIB] * 20):
        memory.give(memory.take(size_bytes), None)
        memory.rest()
    assert memory.slab_bytes == (64 if retain else 4) * KIB
    ledger = memory.backend.ledger
    assert ledger.by_owner(Tier.HOST) == {"test": memory.slab_bytes}
    assert ledger.pinned_bytes == memory.slab_bytes


def test_nothing_goes_back_while_something_is_in_use() -> None:
    memory = arena(retain=False)
    held = memory.take(64 * KIB)
    for _ in range(20):
        memory.give(memory.take(KIB), None)
        memory.rest()
    assert memory.slab_bytes == 65 * KIB
    memory.give(held, None)


def test_closed_it_holds_nothing() -> None:
    memory = arena()
    memory.give(memory.take(KIB), None)
    memory.close()
    gc.collect()
    assert memory.backend.ledger.by_owner(Tier.HOST) == {}
    memory.take(KIB)
    assert memory.slab_bytes == KIB


def test_h25_what_is_handed_over_stays_as_it_is_and_grows_no_more() -> None:
    memory = arena(limit_bytes=12 * KIB)
    for size_bytes in (4 * KIB, 2 * KIB):
        memory.give(memory.take(size_bytes), Event())
    graph = memory.hand_over()
    assert (graph.slab_bytes, memory.slab_bytes) == (6 * KIB, 0)
    blocks = [graph.take(n) for n in (4 * KIB, 2 * KIB)]
    assert [block.after for block in blocks] == [None, None]
    with pytest.raises(ModelError, match="6,144 bytes of host memory do not suffice for a CUDA graph"):
        graph.take(KIB)
    mine = memory.take(6 * KIB)
    slabs = [block.buffer.data.untyped_storage().data_ptr() for block in (*blocks, mine)]
    assert len(set(slabs)) == len(slabs) == 3
    with pytest.raises(MemoryLimitError, match="13,312 bytes of host memory needed"):
        memory.take(KIB)
    for block in blocks:
        graph.give(block, None)
    for _ in range(20):
        graph.rest()
        memory.rest()
    assert graph.slab_bytes == 6 * KIB
    graph.close()
    memory.give(mine, None)
    memory.close()
    assert memory.backend.ledger.by_owner(Tier.HOST) == {}
