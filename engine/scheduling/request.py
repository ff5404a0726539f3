"""A request as the engine sees it: one choice of one prompt, with its tokens, its place in the order and how it ended."""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from engine.protocol import EngineCoreRequest, FinishReason, RequestTimes
from gpu.plan import Int32Array, SamplingParams, child_seed

TOKEN_BYTES = 4  # a token id is a little-endian int32 wherever tokens are kept as bytes


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits again, output tokens kept
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def waits(self) -> bool:
        return self in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


_FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class Request:
    """One choice. `n` choices of a prompt are `n` requests that share the prompt's blocks through the prefix cache.

    Tokens are kept as bytes, prompt first. While a request runs, its newest tokens stand in its row of the scheduler
    (`Scheduler.output_token_ids` has them all); once it does not run, they are all here.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "choice",
        "client",
        "error",
        "finish_reason",
        "handle",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "ordered_stop",
        "priority",
        "request_id",
        "row",
        "sampling",
        "seed",
        "sequence",
        "status",
        "stop_reason",
        "times",
        "token_bytes",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Int32Array,
        sampling: SamplingParams,
        *,
        choice: int = 0,
        seed: int | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        client: int = 0,
        handle: int = 0,
        times: RequestTimes | None = None,
    ) -> None:
        """`client` and `handle` are opaque here: they come back in the outputs. Raises ValueError for an empty prompt."""
        if len(prompt_token_ids) == 0:
            raise ValueError(f"request {request_id} has an empty prompt")
        self.request_id = request_id
        self.choice = choice
        if choice > 0 and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # the same for all choices: the first tells them
        self.sampling = sampling
        self.seed = child_seed(sampling.seed, choice) if seed is None else seed
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.client = client
        self.handle = handle
        self.times = times or RequestTimes(enqueued=arrival_time)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_bytes = bytearray(np.ascontiguousarray(prompt_token_ids, dtype=np.int32).tobytes())

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache answered at the first admission
        self.num_prompt_logprobs = 0  # positions up to here (exclusive) have been told; the first has none

        self.ordered_stop: tuple[int, str | None] | None = None  # stops at so many output tokens, with this stop reason

        self.sequence = -1  # order in which the scheduler got it
        self.row = -1  # row of the workers' tables while it holds one
        self.block_ids: list[int] = []  # KV blocks held, in order of position
        self.block_hashes: list[bytes] = []  # of the leading full blocks, as far as computed

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}/{self.choice}, {self.status.name}, {self.num_tokens} tokens, {len(self.block_ids)} blocks)"
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.choice

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens kept here."""
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        return self.times.num_preemptions

    @property
    def token_ids(self) -> Int32Array:
        """[num_tokens], a copy."""
        return np.frombuffer(bytes(self.token_bytes), dtype=np.int32)

    @property
    def prompt_token_ids(self) -> Int32Array:
        return np.frombuffer(bytes(self.token_bytes[: self.num_prompt_tokens * TOKEN_BYTES]), dtype=np.int32)

    @property
    def output_token_ids(self) -> Int32Array:
        """All of them once the request has ended; of a running one, those of its full blocks at least."""
        return np.frombuffer(bytes(self.token_bytes[self.num_prompt_tokens * TOKEN_BYTES :]), dtype=np.int32)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt logprobs have yet to be told, so that the prompt must be computed and not read from the cache."""
        return self.sampling.prompt_logprobs is not None and max(self.num_prompt_logprobs, 1) < self.num_prompt_tokens

    def resume(self, token_ids: Int32Array, num_cached_tokens: int, times: RequestTimes) -> None:
        """Go on behind output tokens that another engine sampled, as after a preemption; without any, start as a new request does.

        `num_cached_tokens` and `times` are that engine's, as far as they are known.
        """
        if not len(token_ids):
            return
        self.token_bytes += np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
        self.status = RequestStatus.PREEMPTED
        self.num_cached_tokens = num_cached_tokens
        here = self.times
        self.times = msgspec.structs.replace(
            times,
            enqueued=here.enqueued,
            received=times.received or here.received,
            last_token=times.last_token or here.received,  # no later than this
            finished=0.0,
        )

    def end(self, reason: FinishReason, keep: int, stop_reason: int | str | None, error: str | None, now: float) -> None:
        """The terminal transition, once. `keep` >= 0 cuts the output to that many tokens; it never has more than max_tokens."""
        if self.status.finished:
            raise RuntimeError(f"{self} ends twice")
        self.status = _FINISHED_STATUS[reason]
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error = error
        self.times.finished = now
        kept = self.sampling.max_tokens if keep < 0 else keep
        del self.token_bytes[(self.num_prompt_tokens + kept) * TOKEN_BYTES :]


def make_requests(source: EngineCoreRequest, prompt: Int32Array, enqueued: float, received: float) -> list[Request]:
    """The choices of a request that was put on the bus and taken from it at these times (epoch seconds)."""
    return [
        Request(
            source.request_id,
            prompt,
            source.sampling,
            choice=choice,
            priority=source.priority,
            arrival_time=enqueued,
            cache_salt=source.cache_salt,
            handle=source.handle,
            times=RequestTimes(enqueued, received),
        )
        for choice in range(source.sampling.n)
    ]
