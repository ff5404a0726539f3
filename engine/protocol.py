"""The structs that cross Redis: typed, versioned, compact MessagePack. Nothing else is put on the bus, and nothing is pickled.

Structs are arrays on the wire: fields are only ever appended, each with a default. Columns are little-endian bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from gpu.plan import GRAMMAR_LIMITS as GRAMMAR_LIMITS  # part of a request: API servers take these from here
from gpu.plan import GREEDY_EPSILON as GREEDY_EPSILON
from gpu.plan import INVALID_REQUEST as INVALID_REQUEST
from gpu.plan import Count, Int64
from gpu.plan import SamplingParams as SamplingParams
from gpu.plan import ThinkingBudget as ThinkingBudget

READ_VERSIONS = (1, 2)  # of requests, that an engine takes; version 1 knew no failover
WRITTEN_VERSIONS = (2,)  # of requests; an API server writes the newest of these that all live engines of the model read
PROTOCOL_VERSION = WRITTEN_VERSIONS[-1]
TIMED_OUT = "The request's deadline passed "  # the beginning of the errors of late requests
LATE_IN_QUEUE = f"{TIMED_OUT}while it waited for an engine."
LATE = f"{TIMED_OUT}before its output was complete."
FOREVER = 1e9  # seconds of grace: the request goes on to its end, whether an API server listens or not

Struct = TypeVar("Struct")
Choice = Annotated[int, Meta(ge=-1, lt=2**31)]  # -1, where it may stand: all


class FinishReason(enum.IntEnum):
    STOP = 0  # an EOS or stop token, or a stop string found by the API server
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class RequestTimes(msgspec.Struct, array_like=True):
    """Seconds since the epoch, by Redis' clock, at which a request passed each mark; 0.0: not passed."""

    enqueued: float = 0.0  # put on the stream
    received: float = 0.0  # engine took it from the stream
    scheduled: float = 0.0  # first step that computes a token of it begins
    first_token: float = 0.0  # the step that sampled it was taken in
    last_token: float = 0.0
    finished: float = 0.0  # engine: blocks freed
    num_preemptions: int = 0


class AnswerOptions(msgspec.Struct, array_like=True, frozen=True):
    """How an answer is written from its tokens. It travels with the request, so that any API server can go on writing it."""

    stop: list[str] = []  # stop strings
    include_stop: bool = False  # the answer shows the stop string that ended it, and stop tokens
    skip_special_tokens: bool = True
    echo: bool = False  # a text completion begins with its prompt
    logprobs: int | None = None  # most likely tokens to show beside each token; -1: all; None: no logprobs are shown
    prompt_logprobs: bool = False  # shown in a member of their own
    token_ids: bool = False  # shown beside the text
    tokens_as_ids: bool = False  # logprobs show `token_id:N` instead of a token's text
    usage_at_end: bool = False  # a stream's last chunk has the usage
    usage_continuous: bool = False  # every chunk has its choice's usage
    usage_details: bool = False  # usage counts cached tokens too
    role: str = ""  # of a chat's answer
    prefix: str = ""  # of a chat's answer: the message that it continues, where that is to be echoed
    tool_format: str = ""  # in which a chat's answer has tool calls; "": none are looked for
    tools: dict[str, dict[str, str]] = {}  # that the request offers, each with the types of its parameters; "": not one type
    one_call: bool = False  # the answer shows the first tool call alone
    reasoning_format: str = ""  # in which a chat's answer has reasoning; "": none is looked for
    reasoning_open: bool = False  # the answer begins with reasoning, whose opening the prompt has
    reasoning_hidden: bool = False  # the answer does not show it
    service_tier: str = ""  # that the answer shows; "": none was asked for


class RequestFacts(msgspec.Struct, array_like=True, frozen=True):
    """What the engine does not need of a request: its record is made of this, and any API server can go on with the answer."""

    external_id: str = ""  # the id that the client knows it by; several requests may share one. "": the request's own
    retention: float = 3600.0  # seconds that the record is kept after the request's end, whichever process ends it
    endpoint: str = ""
    stream: bool = False
    model: str = ""  # the name that the client asked for; "": the canonical one
    created: float = 0.0  # epoch seconds at which the HTTP request came
    grace: float = 0.0  # seconds that it goes on without an API server that listens; 0.0: it ends with its connection
    place: int = 0  # of the prompt in the HTTP request's list
    num_prompts: int = 1  # of that list
    prompt_text: str | None = None  # where the answer shows it
    idempotency_key: str = ""  # the Idempotency-Key of the HTTP request
    body_hash: str = ""  # of the HTTP request, where it has such a key
    answer: AnswerOptions = AnswerOptions()
    weight: float = 1.0  # of the tenant, whose share of the engines it is
    timeout: float = 0.0  # seconds after its enqueue at which the request ends, however far it is; 0.0: never
    queue_timeout: float = 0.0  # seconds that it may wait for an engine; 0.0: for as long as it takes
    kept_body: bytes = b""  # what answers repeat of the HTTP request's body, and later requests may refer to; the endpoint's JSON
    tier: str = ""  # service tier: "priority" is taken before "", and "flex" behind it


OUTLINE_TOKENS = 16  # of a prompt's end: text begins in the middle of a character or a word where the prompt leaves one


class RequestOutline(msgspec.Struct, array_like=True, frozen=True):
    """A request without what its answer does not show. The record has it, so that the answer can be written after the end too."""

    sampling: SamplingParams
    num_prompt_tokens: int
    prompt_token_ids: bytes  # int32: the last OUTLINE_TOKENS, or the whole prompt where the answer shows it
    facts: RequestFacts


class EngineCoreRequest(msgspec.Struct, array_like=True, frozen=True):
    """API server to engine: one prompt with its `sampling.n` choices. Raises ValueError (decoded: msgspec.ValidationError) for what
    cannot be a request."""

    version: int
    request_id: str  # internal: the client's id, "-", 8 random hex digits
    prompt_token_ids: bytes  # int32 column
    sampling: SamplingParams
    client: str  # incarnation of the API server that listened first; the record has the one that listens now
    handle: Int64  # that server's own number for the request; outputs carry it instead of the id
    priority: Int64 = 0  # lower is earlier
    tenant: str = ""
    cache_salt: str = ""
    trace_headers: dict[str, str] = {}
    facts: RequestFacts = RequestFacts()

    def __post_init__(self) -> None:
        if not self.prompt_token_ids or len(self.prompt_token_ids) % 4:
            raise ValueError(f"a prompt of {len(self.prompt_token_ids)} bytes is not a column of token ids")

    def outline(self) -> RequestOutline:
        answer, sampling = self.facts.answer, self.sampling
        shown = answer.echo or answer.token_ids or sampling.prompt_logprobs is not None
        prompt = self.prompt_token_ids if shown else self.prompt_token_ids[-4 * OUTLINE_TOKENS :]
        if sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words_token_ids or sampling.grammar:
            sampling = replace(sampling, logit_bias={}, allowed_token_ids=[], bad_words_token_ids=[], grammar="")
        return RequestOutline(sampling, len(self.prompt_token_ids) // 4, prompt, self.facts)


class OutputLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of one output token."""

    handle: int
    choice: int
    offset: int
    token_ids: bytes  # int32 [1 + k]: the sampled token, then the top k
    logprobs: bytes  # float32 [1 + k]
    rank: int


class OutputPromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of prompt tokens from `position` (>= 1) on. Choice 0's prompt stands for all choices."""

    handle: int
    position: int
    token_ids: bytes  # int32 [num_positions, 1 + k]
    logprobs: bytes  # float32 [num_positions, 1 + k]
    ranks: bytes  # int32 [num_positions]

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.position + len(self.ranks) // 4

    def tail(self, position: int) -> OutputPromptLogprobs:
        """The part from `position` on, which lies inside."""
        skip = position - self.position
        if skip == 0:
            return self
        row = len(self.token_ids) // (len(self.ranks) // 4)  # bytes
        return OutputPromptLogprobs(
            self.handle, position, self.token_ids[row * skip :], self.logprobs[row * skip :], self.ranks[4 * skip :]
        )


class FinishedOutput(msgspec.Struct, array_like=True):
    """The one terminal output of a choice. `num_tokens` counts all its output tokens: a receiver that has fewer has a gap."""

    handle: int
    choice: int
    num_tokens: int
    reason: FinishReason
    stop_reason: int | str | None
    num_cached_tokens: int  # prompt tokens that the prefix cache answered
    times: RequestTimes
    error: str | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, tag=1):
    """One step's outputs for one API server. Row i: token `token_ids[i]` is output number `offsets[i]` of a choice."""

    engine: str  # model and slot
    incarnation: int
    flush_number: int  # the incarnation's flushes count up from 1; ids of its journal
    handles: bytes = b""  # int64 [num_outputs]
    choices: bytes = b""  # int32 [num_outputs]
    offsets: bytes = b""  # int32 [num_outputs]
    token_ids: bytes = b""  # int32 [num_outputs]
    logprobs: list[OutputLogprobs] = []
    prompt_logprobs: list[OutputPromptLogprobs] = []
    finished: list[FinishedOutput] = []
    replayed: list[int] = []  # answers of a `Replay`, by handle: this message has all that the stream may lack
    cut_short: list[int] = []  # it has not: the client asks again
    not_held: list[int] = []  # the engine does not hold the request, or not yet


class RequestEnded(msgspec.Struct, array_like=True, tag=2):
    """A request ended without a terminal output of its engine: it was aborted while queued, its engine died, or its engine cannot
    run it. The scripts `finish`, `fail_engine` and `reject` publish it, built with cmsgpack; the field order is theirs too."""

    request_id: str
    handle: int
    reason: FinishReason
    error: str | None = None


class ControlReply(msgspec.Struct, array_like=True, tag=3):
    """Answer to a control command, on the channel of the process that asked. `ok` is False, with `error`, when the call failed."""

    token: str  # the command's
    ok: bool = True
    value: Any = None
    num_tokens: int = 0  # output tokens of an aborted request, summed over its choices
    error: str | None = None


class Detached(msgspec.Struct, array_like=True, tag=4):
    """Another stream listens to the request now. The script `attach` publishes it, built with cmsgpack, in this order of fields."""

    request_id: str
    handle: int


ClientMessage = EngineCoreOutputs | RequestEnded | ControlReply | Detached


class StoredChoice(msgspec.Struct, array_like=True):
    """A choice's whole output in the record of an ended request: what a receiver with a gap, or a later one, reads."""

    token_ids: bytes
    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[OutputLogprobs] = []


class StoredOutput(msgspec.Struct, array_like=True):
    choices: list[StoredChoice]
    num_cached_tokens: int
    times: RequestTimes
    prompt_logprobs: list[OutputPromptLogprobs] = []


# Control stream of an engine. `reply_to` is the client (as in EngineCoreRequest.client) that waits for a `ControlReply`, "" when
# no client does; `token` is that client's own mark on it.


class Abort(msgspec.Struct, array_like=True, tag=1):
    """End a request, or one choice of it. Answered by a `ControlReply` when its blocks are free.

    `keep` >= 0: the output is cut to that many tokens (a stop string ended inside it). With reason STOP the choice counts as
    finished well; `stop_reason` is the string.
    """

    request_id: str
    choice: Choice = -1  # -1: all
    reason: FinishReason = FinishReason.ABORT
    keep: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    stop_reason: str | None = None
    reply_to: str = ""
    token: str = ""
    error: str | None = None  # with reason ERROR: why


class Lack(msgspec.Struct, array_like=True):
    """The output of one request that a receiver may lack: of each (choice, offset) the tokens from the offset on, and the end; and
    prompt logprobs from `prompt_position` on (0: none)."""

    request_id: str
    handle: Int64  # the receiver's: the output comes under it
    choices: list[tuple[Count, Count]]
    prompt_position: Count = 0


class Replay(msgspec.Struct, array_like=True, tag=4):
    """Publish again, to `client`, what its streams may lack: they saw a gap, or silence. Answered by one `EngineCoreOutputs`."""

    client: str
    lacks: list[Lack]


class Attach(msgspec.Struct, array_like=True, tag=5):
    """Publish what the request puts out to another API server from now on. What it has put out is asked for by a `Replay`."""

    request_id: str
    client: str
    handle: Int64


class Utility(msgspec.Struct, array_like=True, tag=3):
    """Run a named call in the engine: reset_prefix_cache, sleep, wake_up, start_profile, stop_profile, drain."""

    name: str
    arguments: list[Any] = []
    reply_to: str = ""
    token: str = ""


ControlCommand = Abort | Replay | Utility | Attach


class EngineStats(msgspec.Struct):
    """An engine's live snapshot, in its slot twice a second; counters count from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    num_preempted_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0..1
    num_free_blocks: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    prompt_tokens: int = 0  # of prompts whose first token is there, each counted once
    prompt_tokens_cached: int = 0  # of those, the ones that the prefix cache answered
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens of admitted choices, looked up
    prefix_cache_hits: int = 0  # of those, tokens found
    preemptions: int = 0
    finished: dict[str, int] = {}  # by finish reason, choices
    iteration_tokens_buckets: list[int] = []  # cumulative counts under ITERATION_TOKENS_BOUNDS, +Inf last
    iteration_tokens_sum: int = 0  # prompt tokens computed and tokens generated, summed over steps
    last_step_seconds: float = 0.0
    step_seconds_buckets: list[int] = []  # cumulative counts under STEP_SECONDS_BOUNDS, +Inf last
    step_seconds_sum: float = 0.0  # of the workers' time for steps
    step_slowdown: float = 1.0  # what steps take, over what the worker measured when the engine started
    choices_per_second: float = 0.0  # that it gets done while it is full; 0.0: not known yet


ITERATION_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)


class EngineInfo(msgspec.Struct):
    """The description of an engine for API servers and operators, kept beside its slot."""

    slot: str  # "0", "1", ...: the lowest free number at its start
    incarnation: int
    model: str
    served_names: list[str]
    fingerprint: str
    protocol_versions: list[int]  # of requests that it reads
    tokenizer: str  # content hash of the TokenizerBundle
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int
    max_logprobs: int
    dtype: str
    device: str
    tensor_parallel_size: int
    pid: int
    host: str
    started: float
    state: str = "ready"  # "ready" | "draining" | "sleeping"
    stats: EngineStats = msgspec.field(default_factory=EngineStats)
    progress: dict[str, int] = {}  # output tokens so far of each request held that runs
    waiting: dict[str, int] = {}  # the same of each request held that waits in the engine
    scheduling_policy: str = "fcfs"  # "fcfs": priorities count for nothing


class TokenizerBundle(msgspec.Struct):
    """All an API server needs of a model's files. Stored under its content hash."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    generation_config: dict[str, Any]  # the sampling defaults of the model, as in generation_config.json
    tokenizer_config: dict[str, Any] = {}  # further variables that chat templates may read (special tokens by name)


def encode_column(values: Any, dtype: type[np.generic] = np.int32) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def decode_column(payload: bytes, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    return np.frombuffer(payload, dtype=dtype)


def _reader(kind: type[Struct]) -> Callable[[bytes], Struct]:
    """A decoder of `kind`. For any bytes it returns a value or raises msgspec.DecodeError."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(payload: bytes) -> Struct:
        try:
            return decode(payload)
        except RecursionError as error:
            raise msgspec.DecodeError("Lists are nested too deeply") from error

    return read


encode = msgspec.msgpack.Encoder().encode
decode_request = _reader(EngineCoreRequest)
decode_client_message: Callable[[bytes], ClientMessage] = _reader(ClientMessage)  # type: ignore[arg-type]
decode_control: Callable[[bytes], ControlCommand] = _reader(ControlCommand)  # type: ignore[arg-type]
decode_outline = _reader(RequestOutline)
decode_stored = _reader(StoredOutput)
decode_info = _reader(EngineInfo)
decode_bundle = _reader(TokenizerBundle)
