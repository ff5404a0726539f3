"""The structs that cross between engine and workers: `SchedulerOutput` out, `ModelRunnerOutput` back.

Torch-free, so that the engine can import it. A worker keeps one row of state for each request. Everything that grows with the batch
is a numpy column. Everything else says only what changed since the step before: new rows, freed rows and new blocks.
On the wire (multi-process executor) the structs are MessagePack; columns travel as their little-endian bytes.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]

GREEDY_EPSILON = 1e-5  # a temperature below this means argmax
INVALID_REQUEST = "Invalid request: "  # begins an error whose cause is the request's own fields: it would fail anywhere
MOST_CHOICES = 16384  # of one prompt
# llguidance's limits (LLParserLimits): what compiling a grammar may cost, and each of its masks, before it counts as too complex.
# API servers and workers have the same ones. In a millisecond about 50,000 units of fuel burn in compiling, and 14,000 in masks.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

# The values that columns and kernels can hold. Decoding a struct with another value, NaN included, raises an error.
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
LogprobCount = Annotated[int, Meta(ge=-1, lt=2**31)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning stands in the output between two marks, each a token. It is ended behind so many tokens."""

    budget: Count
    opening: TokenId
    closing: TokenId
    is_open: bool = False  # the prompt ends with the opening


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token of a request is chosen and when it ends; token ids only (stop strings live in the API server).

    All values are resolved and validated by the API server: no None that means "the model's default".
    `seed` is always set (drawn by the API server when the client gave none); child i of `n` samples with `child_seed(seed, i)`.
    """

    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0  # < GREEDY_EPSILON: argmax
    top_p: Share = 1.0
    top_k: Count = 0  # 0: off
    min_p: Share = 0.0
    seed: Int64 = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=sys.float_info.max)] = 1.0  # over prompt and output
    logit_bias: dict[TokenId, Penalty] = {}
    allowed_token_ids: list[TokenId] = []  # empty: all
    bad_words_token_ids: list[list[TokenId]] = []
    grammar: str = ""  # of llguidance, as JSON or Lark, that the output matches; empty: any output
    thinking: ThinkingBudget | None = None
    max_tokens: Count = 16  # resolved to the context's room when the client gave none; 0: only the prompt is scored
    min_tokens: Count = 0
    ignore_eos: bool = False
    eos_token_ids: list[int] = []  # the model's; end a request with stop_reason None unless ignore_eos
    stop_token_ids: list[TokenId] = []  # the client's; end it with stop_reason = the id
    logprobs: LogprobCount | None = None  # None: none; k: sampled token + top k; -1: whole vocabulary
    prompt_logprobs: LogprobCount | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def held_back_token_ids(self) -> frozenset[int]:
        """Ids that are not sampled before the output has `min_tokens` tokens: all that end an output, ignored or not."""
        return frozenset((*self.eos_token_ids, *self.stop_token_ids)) if self.min_tokens > 0 else frozenset()


def child_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request: the request's own for choice 0, else an odd-multiplier mix in 64 bits."""
    if choice == 0:
        return seed
    return ((seed & 0xFFFFFFFFFFFFFFFF) ^ (choice * 0x9E3779B97F4A7C15)) & 0x7FFFFFFFFFFFFFFF


class NewRequest(msgspec.Struct, array_like=True):
    """A request whole, for a row that the workers do not hold (first admission, or again after preemption)."""

    row: int
    token_ids: Int32Array  # [num_tokens] prompt and what was sampled before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int  # > 0 on a prefix-cache hit: KV of these positions stands in the blocks already
    block_ids: Int32Array  # [num_blocks] all blocks held, those of this step's tokens included
    sampling: SamplingParams
    seed: int  # child_seed of the request's seed


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step. Workers apply it in the order of the fields: free rows, take new requests, append blocks, then compute.

    A row samples when this step computes its last known token; the worker appends the sampled token to its own row, so that a
    decode step carries no token ids at all.
    """

    step: int
    freed_rows: list[int]  # ended or preempted since the last step
    new_requests: list[NewRequest]
    grown_rows: Int32Array  # [num_new_blocks] rows held already that get a block, in order of append
    grown_blocks: Int32Array  # [num_new_blocks] the block ids they get
    rows: Int32Array  # [num_scheduled] rows that compute in this step
    num_scheduled_tokens: Int32Array  # [num_scheduled] how many tokens each, >= 1
    total_num_scheduled_tokens: int


class SampledLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of one sampled token, for a row that asked."""

    row: int
    token_ids: Int32Array  # [1 + k] the sampled token, then the top k
    logprobs: Float32Array  # [1 + k]
    rank: int  # of the sampled token, 1 is the most likely


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of prompt tokens computed in this step: entry i tells of the token at `position + i`, given all before it."""

    row: int
    position: int  # >= 1: the first prompt token has none
    token_ids: Int32Array  # [num_positions, 1 + k], flattened
    logprobs: Float32Array  # [num_positions, 1 + k], flattened
    ranks: Int32Array  # [num_positions]


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    step: int
    rows: Int32Array  # [num_sampled] in the order of SchedulerOutput.rows
    token_ids: Int32Array  # [num_sampled]
    logprobs: list[SampledLogprobs]
    prompt_logprobs: list[PromptLogprobs]
    failed_rows: dict[int, str]  # scheduled rows that failed, now or in a step before, and why; they sample nothing until freed
    forward_seconds: float
    num_threads: int = 1  # that computed the step, on a CPU


def _encode_column(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value)} does not cross between engine and workers")


def _decode_column(kind: Any, value: Any) -> Any:
    dtype = np.float32 if kind == Float32Array else np.int32
    return np.frombuffer(value, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_plan_decoder = msgspec.msgpack.Decoder(SchedulerOutput, dec_hook=_decode_column)
_output_decoder = msgspec.msgpack.Decoder(ModelRunnerOutput, dec_hook=_decode_column)


def encode(message: SchedulerOutput | ModelRunnerOutput) -> bytes:
    return _encoder.encode(message)


def decode_plan(payload: bytes) -> SchedulerOutput:
    return _plan_decoder.decode(payload)


def decode_output(payload: bytes) -> ModelRunnerOutput:
    return _output_decoder.decode(payload)
