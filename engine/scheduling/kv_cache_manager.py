"""The KV of requests: prefix cache hits, the blocks that a request holds, and when its blocks enter the cache."""

from __future__ import annotations

from typing import NamedTuple

from engine.scheduling.block_pool import BlockPool, extend_hashes
from engine.scheduling.request import Request


class PrefixHit(NamedTuple):
    block_ids: list[int]  # blocks whose KV the request need not compute
    num_published: int  # the first so many are in the cache; the others are written by a step that has not returned
    num_free: int  # of all of them, how many count as free now and no longer do once touched


NO_HIT = PrefixHit([], 0, 0)


class KVCacheManager:
    """The one owner of blocks: every allocation and every free goes through here.

    A block enters the prefix cache when the step that wrote it has returned. Until then a full prompt block is only *announced*:
    a request of the same or the next step may share it. Workers execute steps in order, and write all KV of a layer before
    any row of the step reads it. So duplicates that come together compute their prompt once.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._announced: dict[bytes, int] = {}
        self._announced_in: dict[int, list[bytes]] = {}  # by step

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reads_cache(self, request: Request) -> bool:
        """Prompt logprobs come from computing the prompt: such a request only writes the cache."""
        return self.enable_prefix_caching and not request.wants_prompt_logprobs

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest prefix whose KV stands in blocks, leaving at least the last token to compute. Changes nothing."""
        if not self.reads_cache(request):
            return NO_HIT
        pool = self.pool
        num_published = -1
        blocks: list[int] = []
        num_free = 0
        for digest in self._hashes(request, (request.num_tokens - 1) // self.block_size):
            block = pool.find(digest)
            if block is None:
                if num_published < 0:
                    num_published = len(blocks)
                block = self._announced.get(digest)
                if block is None:
                    break
            blocks.append(block)
            num_free += pool.ref_count(block) == 0
        return PrefixHit(blocks, num_published if num_published >= 0 else len(blocks), num_free)

    def admit(self, request: Request, hit: PrefixHit, num_blocks: int) -> None:
        """Give a request that holds nothing its hit and `num_blocks` more. The caller has seen that they are free."""
        assert not request.block_ids
        self.pool.touch(hit.block_ids)
        request.block_ids = hit.block_ids + self.pool.allocate(num_blocks)

    def grow_all(self, requests: list[Request], counts: list[int]) -> list[int]:
        """`counts[i]` blocks more for `requests[i]`; returns all of them in order. The caller has seen that they are free."""
        blocks = self.pool.allocate(sum(counts))
        start = 0
        for request, count in zip(requests, counts, strict=True):
            request.block_ids += blocks[start : start + count]
            start += count
        return blocks

    def free(self, request: Request) -> None:
        """Drop all that the request holds: the one place where blocks are freed."""
        self.pool.free(request.block_ids)
        request.block_ids = []

    def exhausted(self, num_blocks: int) -> str:
        """The error of a request that needs so many blocks, which are more than there are."""
        return (
            f"KV cache exhausted: the request alone needs {num_blocks} blocks of {self.block_size} tokens, "
            f"the cache has {self.pool.num_usable}"
        )

    def announce(self, request: Request, num_computed: int, num_tokens: int, step: int) -> None:
        """The full blocks of a prompt that `num_tokens` from position `num_computed` on complete are written by `step`."""
        first, last = num_computed // self.block_size, (num_computed + num_tokens) // self.block_size
        if last == first or not self.enable_prefix_caching:
            return
        announced = self._announced_in.setdefault(step, [])
        for digest, block in zip(self._hashes(request, last)[first:], request.block_ids[first:last], strict=True):
            if digest not in self._announced:
                self._announced[digest] = block
                announced.append(digest)

    def step_returned(self, step: int) -> None:
        for digest in self._announced_in.pop(step, ()):
            del self._announced[digest]

    def publish(self, request: Request, first: int, last: int) -> None:
        """The KV of the full blocks `first`..`last` (exclusive) is written, and the request has their tokens."""
        if not self.enable_prefix_caching:
            return
        extend_hashes(request, last, self.block_size)
        for index in range(first, last):
            self.pool.publish(request.block_ids[index], request.block_hashes[index])

    def distrust(self, request: Request) -> None:
        """The KV of a failed request may be wrong (NaN): from now on it answers no prefix."""
        self.pool.forget(request.block_ids)
        self.revoke(request)

    def revoke(self, request: Request) -> None:
        """Steps that are out write the request's blocks from KV that is not to be trusted: no request may share them any more."""
        blocks = set(request.block_ids)
        for announced in self._announced_in.values():
            revoked = [digest for digest in announced if self._announced[digest] in blocks]
            for digest in revoked:
                announced.remove(digest)
                del self._announced[digest]

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Digests of the request's first `count` blocks; computed as far as they are not yet."""
        extend_hashes(request, count, self.block_size)
        hashes = request.block_hashes
        return hashes if len(hashes) == count else hashes[:count]
