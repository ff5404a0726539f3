"""Block pool and prefix hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.block_pool import BlockPool, extend_hashes, hash_blocks
from tests.engine.scheduling.harness import make_request


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def test_only_full_blocks_are_hashed_and_the_chain_carries_the_past() -> None:
    assert hash_blocks(tokens(1, 2, 3), 4) == []
    one = hash_blocks(tokens(1, 2, 3, 4, 5, 6, 7, 8, 9), 4)
    assert len(one) == 2
    other = hash_blocks(tokens(9, 2, 3, 4, 5, 6, 7, 8), 4)
    assert one[0] != other[0] and one[1] != other[1], "equal second blocks after different first ones"
    assert hash_blocks(tokens(1, 2, 3, 4, 5, 6, 7, 8), 4) == one


def test_a_chain_continues_from_its_parent() -> None:
    whole = hash_blocks(tokens(*range(12)), 4, "salt")
    assert hash_blocks(tokens(*range(4, 12)), 4, "salt", whole[0]) == whole[1:]


def test_salts_part_chains() -> None:
    chains = [hash_blocks(tokens(1, 2, 3, 4), 4, salt)[0] for salt in ("", "a", "b", "\x01\x00\x00\x00")]
    assert len(set(chains)) == 4


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_two_prompts_share_digests_exactly_as_far_as_they_share_blocks(a: list[int], b: list[int], block_size: int) -> None:
    shared = sum(x == y for x, y in zip(hash_blocks(tokens(*a), block_size), hash_blocks(tokens(*b), block_size), strict=False))
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert shared == common // block_size


def test_a_request_is_hashed_as_far_as_asked() -> None:
    request = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="s")
    whole = hash_blocks(tokens(*range(1, 9)), 4, "s")
    for count, known in ((1, 1), (2, 2), (1, 2)):
        extend_hashes(request, count, 4)
        assert request.block_hashes == whole[:known]


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(6)
    held = pool.allocate(2)
    pool.publish(held[0], digest(1))
    pool.free(held)
    with pytest.raises(ValueError, match="6 blocks wanted, 5 free"):
        pool.allocate(6)
    assert pool.num_free == 5 and pool.find(digest(1)) == held[0]
    pool.check_integrity([])
    assert pool.allocate(0) == []


def test_blocks_without_a_hash_go_first_then_cached_ones_from_the_tail_of_the_oldest() -> None:
    pool = BlockPool(8)
    old, young = pool.allocate(3), pool.allocate(3)  # one block was never used
    for number, block in enumerate(old[:2] + young[:2]):
        pool.publish(block, digest(number))
    pool.free(old)
    pool.free(young)
    given_out = pool.allocate(7)
    assert given_out[:3] == [young[2], old[2], 7], "partial blocks first, the last freed before all"
    assert given_out[3:] == [old[1], old[0], young[1], young[0]], "then the least recently used, tails before heads"
    assert pool.num_cached == 0


def test_a_touched_block_is_not_evicted_and_counts_its_holders() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    for number, block in enumerate(held):
        pool.publish(block, digest(number))
    pool.free(held)
    pool.touch(held)
    pool.touch(held[:1])
    assert [pool.ref_count(block) for block in held] == [2, 1]
    assert pool.num_free == 1 and pool.allocate(1) == [3]
    pool.check_integrity([held, held[:1], [3]])
    with pytest.raises(ValueError):
        pool.allocate(1)
    pool.free(held)
    assert pool.num_free == 1 and pool.find(digest(0)) == held[0]
    pool.free(held[:1])
    assert pool.num_free == 2


def test_evicting_one_of_two_equal_blocks_keeps_the_other() -> None:
    for first_out in (0, 1):
        pool = BlockPool(3)
        twins = pool.allocate(2)
        for block in twins:
            pool.publish(block, digest(7))
        assert pool.num_cached == 2
        pool.free([twins[first_out]])
        pool.allocate(1)
        assert pool.find(digest(7)) == twins[1 - first_out]
        pool.check_integrity([[twins[first_out]], [twins[1 - first_out]]])


def test_the_last_of_three_equal_blocks_is_still_found() -> None:
    pool = BlockPool(4)
    triplets = pool.allocate(3)
    for block in triplets:
        pool.publish(block, digest(7))
    pool.free([triplets[1]])
    pool.free([triplets[0]])
    pool.allocate(1)
    pool.check_integrity([[triplets[1]], [triplets[2]]])
    pool.allocate(1)
    assert pool.find(digest(7)) == triplets[2]
    pool.forget([triplets[2]])
    assert pool.find(digest(7)) is None and pool.num_cached == 0
    pool.check_integrity([[block] for block in triplets])


def test_a_second_free_is_an_error() -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.free(held)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(held)


def test_reset_only_when_nothing_is_held() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.publish(held[0], digest(1))
    assert not pool.reset_prefix_cache() and pool.find(digest(1)) == held[0]
    pool.free(held)
    assert pool.reset_prefix_cache() and pool.find(digest(1)) is None and pool.num_free == 3
    pool.check_integrity([])
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_integrity_names_a_leak() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.check_integrity([held])
    with pytest.raises(AssertionError, match=f"block {held[0]} has 1 references and 0 holders"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="has 1 references and 2 holders"):
        pool.check_integrity([held, held])
