"""KV blocks: their holders, the free blocks that still answer a prefix, and the order in which free blocks are given out."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from engine.scheduling.request import TOKEN_BYTES, Request

NULL_BLOCK = 0  # pads block tables; never given out
_PERSON = b"headrace kv"  # keeps these digests apart from any other use of blake2b


def hash_blocks(
    tokens: bytes | bytearray | memoryview, block_size: int, salt: str = "", parent: bytes | None = None
) -> list[bytes]:
    """Digests of the full blocks in `tokens` (int32 bytes): each covers its own tokens and, through its parent, all before it.

    `parent` is the digest of the block before; None: `tokens` begin a prompt, and the chain starts from the salt. A pure function
    that may run on any thread. blake2b with 32 bytes resists collisions even by design, so that a hit needs no look at the tokens.
    """
    if parent is None:
        parent = blake2b(salt.encode(), digest_size=32, person=_PERSON).digest()
    width = block_size * TOKEN_BYTES
    digests = []
    for start in range(0, len(tokens) - width + 1, width):
        parent = blake2b(parent + tokens[start : start + width], digest_size=32, person=_PERSON).digest()
        digests.append(parent)
    return digests


def extend_hashes(request: Request, count: int, block_size: int) -> None:
    """See to it that the request has the digests of its first `count` blocks."""
    hashes = request.block_hashes
    if len(hashes) < count:
        width = block_size * TOKEN_BYTES
        tokens = bytes(request.token_bytes[len(hashes) * width : count * width])
        hashes += hash_blocks(tokens, block_size, request.cache_salt, hashes[-1] if hashes else None)


class BlockPool:
    """Reference counts, free blocks and the hashes under which blocks can be found again.

    Free blocks are given out in this order: those without a hash, the last freed first; then cached ones, the least recently used
    first. A request frees its blocks from the tail, so that of equally old blocks the head of a prefix lives longest.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}  # further blocks of a hash that has one in _block_of
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))  # free and without a hash; the last is next
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free and cached; the first is next

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now, cached ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._block_of) + sum(map(len, self._duplicates.values()))

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find(self, digest: bytes) -> int | None:
        """The block that holds the KV of this chain of tokens, if one does."""
        return self._block_of.get(digest)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, all or none: raises ValueError, changing nothing, when fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        blank = self._blank
        if count <= len(blank):
            split = len(blank) - count
            blocks = blank[: split - 1 if split else None : -1]
            del blank[split:]
        else:
            blocks = blank[::-1]
            blank.clear()
            while len(blocks) < count:
                block, _ = self._evictable.popitem(last=False)
                self._drop_hash(block)
                blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference each; a free cached block is taken out of the free ones."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Drop one reference each. `blocks` stand in order of position, as a request holds them."""
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} is freed twice")
            self._ref_counts[block] = count
            if count == 0:
                if self._hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._evictable[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """From now on `find(digest)` may answer this held block. The caller vouches that its KV is written."""
        if self._hash_of[block] is not None:
            return
        self._hash_of[block] = digest
        if self._block_of.setdefault(digest, block) != block:
            self._duplicates.setdefault(digest, []).append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Held blocks that must never answer a prefix (again)."""
        for block in blocks:
            if self._hash_of[block] is not None:
                self._drop_hash(block)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, with nothing done, while any block is held."""
        if self.num_free != self.num_usable:
            return False
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._duplicates.clear()
        self._hash_of = [None] * self.num_blocks
        return True

    def _drop_hash(self, block: int) -> None:
        digest = self._hash_of[block]
        assert digest is not None
        self._hash_of[block] = None
        others = self._duplicates.get(digest)
        if others is None:
            del self._block_of[digest]
            return
        if self._block_of[digest] == block:
            self._block_of[digest] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._duplicates[digest]

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """`holders` are the block lists of all requests that hold any. Raises AssertionError, naming the block, on any leak."""
        references = Counter(block for blocks in holders for block in blocks)
        blank, evictable = set(self._blank), set(self._evictable)
        assert len(blank) == len(self._blank), "a block is free twice"
        assert NULL_BLOCK not in references and NULL_BLOCK not in blank | evictable, "the null block was given out"
        for block in range(1, self.num_blocks):
            count = self._ref_counts[block]
            assert count == references[block], f"block {block} has {count} references and {references[block]} holders"
            places = (count > 0) + (block in blank) + (block in evictable)
            assert places == 1, f"block {block} is in {places} of: held, blank, cached and free"
            digest = self._hash_of[block]
            assert not (block in blank and digest is not None), f"block {block} is blank and has a hash"
            assert not (block in evictable and digest is None), f"block {block} is evictable and has no hash"
            if digest is not None:
                known = self._block_of.get(digest) == block or block in self._duplicates.get(digest, ())
                assert known, f"block {block} cannot be found by its hash"
        hashed = sum(digest is not None for digest in self._hash_of)
        assert hashed == self.num_cached, f"{hashed} blocks have a hash, {self.num_cached} are known by one"
