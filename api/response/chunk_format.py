"""OpenAI's chunks and whole answers: what chat and text completions share, the chunks' frame, usage, logprobs' spelling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from api.errors import ApiError, body_of
from api.response.answer_format import AnswerFormat
from api.response.generation import Generation
from api.response.logprobs import Json, LogprobsFormatter
from api.response.output_processor import ChoiceOutput
from api.response.request_times import times_as_json
from api.response.stream_position import StreamPosition
from api.response.usage import Usage
from api.version import system_fingerprint
from engine.config import ApiConfig

LONG_TOKENS = 8192  # whose JSON is made in some milliseconds; an alternative in logprobs counts as a token

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


class ChunkFrame:
    """Everything of a stream's chunks that is the same in all of them, encoded once."""

    def __init__(self, id: str, object: str, created: int, model: str, service_tier: str = "") -> None:
        members = {"id": id, "object": object, "created": created, "model": model}
        same = encode_json({**members, "service_tier": service_tier} if service_tier else members)
        self._head = b"data: " + same[:-1] + b',"choices":['

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """The bytes before and behind the one value that changes from event to event; in the item of the list it is between
        `before` and `after`."""
        return self._head + before, after + b"]}\n\n"

    def chunk(self, choices: bytes, **more: Any) -> bytes:
        """One event. `choices`: the encoded items of the list; `more`: further members of the chunk."""
        tail = b"".join(b',"%b":%b' % (name.encode(), encode_json(value)) for name, value in more.items())
        return b"%b%b]%b}\n\n" % (self._head, choices, tail)


class ChunkFormat(AnswerFormat):
    """One endpoint's answers: streams of chunks that end with `[DONE]`, and whole ones."""

    id_prefix: str  # of the answer's id, before the client's
    whole_object: str  # the member `object` of whole answers
    chunk_object: str  # the member `object` of chunks
    text_item: tuple[bytes, bytes]  # the item of a chunk of text alone, before and behind the text; `%d` is the choice's index
    no_text: ClassVar[dict[str, Any]]  # the member of a chunk's item that has the text, without any

    @classmethod
    def position(cls, last: str | None, num_choices: int) -> StreamPosition:
        return StreamPosition.parse(last, num_choices) if last else StreamPosition(num_choices)

    def __init__(self, generation: Generation, config: ApiConfig, position: StreamPosition | int | None = None) -> None:
        """`position`: where a stream that can be continued stands; its events have ids, and what its client has is left out."""
        self._position = position if isinstance(position, StreamPosition) else None
        self._generation = generation
        self._task = task = generation.task
        self._answer = answer = task.answer
        self._logprobs = LogprobsFormatter(task.model.tokenizer, answer.tokens_as_ids)
        self._fingerprint = system_fingerprint(task.model.fingerprint)
        self._id = f"{self.id_prefix}-{generation.external_id}"
        self._frame = ChunkFrame(self._id, self.chunk_object, generation.created, task.model.name, answer.service_tier)
        self._text_only = answer.logprobs is None and not answer.token_ids and not answer.echo
        self._shows_times = config.enable_per_request_metrics
        self._ends: dict[int, tuple[bytes, bytes]] = {}  # by choice: a chunk of text before and behind the text

    # Streamed

    def opening(self) -> bytes:
        position = self._position
        if position is None:
            return b"".join(self._opening())
        events = b""
        for event in list(self._opening())[position.num_opened :]:
            position.num_opened += 1
            events += position.event_id() + event
        return events

    @abstractmethod
    def _opening(self) -> Iterable[bytes]:
        """The chunks before the first output, one by one."""

    def chunks(self, output: ChoiceOutput) -> bytes:
        """What an output shows is in one chunk, the end in one of its own, which strict clients need."""
        if self._position is not None:
            return self._identified_chunks(output, self._position)
        shown = self._text_chunk(output) if self._text_only else self._piece(output)
        return shown if output.finish_reason is None else shown + self._end(output)

    def _identified_chunks(self, output: ChoiceOutput, position: StreamPosition) -> bytes:
        """Those that the client does not have, each behind its id."""
        output = position.untold(output)
        chunks = self._text_chunk(output) if self._text_only else self._piece(output)
        position.tell(output, bool(chunks))
        if chunks:
            chunks = position.event_id() + chunks
        if output.finish_reason is not None:
            position.tell_end(output.index)
            chunks += position.event_id() + self._end(output)
        return chunks

    def _end(self, output: ChoiceOutput) -> bytes:
        """The chunk that ends a choice."""
        more = {} if self._answer.usage_at_end else {"system_fingerprint": self._fingerprint}
        return self._chunk(output.index, encode_json(self._last_item(output)), **more)

    def is_long(self, output: ChoiceOutput) -> bool:
        return not self._text_only and self._num_logprobs(output) > LONG_TOKENS

    def _num_logprobs(self, output: ChoiceOutput) -> int:
        """That its chunks show."""
        return len(output.logprobs) * len(output.logprobs[0].token_ids) if output.logprobs else 0

    @abstractmethod
    def _piece(self, output: ChoiceOutput) -> bytes:
        """The chunk of all that an output shows but the end."""

    def _last_item(self, output: ChoiceOutput) -> dict[str, Any]:
        """The item of the chunk that ends a choice."""
        end = {"finish_reason": self._finish_reason(output), "stop_reason": output.stop_reason}
        return {"index": output.index, **self.no_text, "logprobs": None, **end}

    def _finish_reason(self, output: ChoiceOutput) -> str:
        return str(output.finish_reason)

    def closing(self) -> bytes:
        return self._usage_chunk() + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + body_of(error) + b"\n\n" + DONE

    def _usage_chunk(self) -> bytes:
        """Where the client wants one and does not have it."""
        position = self._position
        if not self._answer.usage_at_end or (position is not None and position.closed):
            return b""
        chunk = self._frame.chunk(b"", usage=self._whole_usage(), system_fingerprint=self._fingerprint, **self._times())
        if position is None:
            return chunk
        position.closed = True
        return position.event_id() + chunk

    def _chunk(self, index: int, choice: bytes, **more: Any) -> bytes:
        """A chunk about choice `index`, which is `choice`, encoded."""
        if self._answer.usage_continuous:
            more["usage"] = self._usage_of(index, self._generation.choices[index].num_tokens)
        return self._frame.chunk(choice, **more)

    def _opening_chunk(self, index: int, choice: bytes, **more: Any) -> bytes:
        """A chunk that shows no token, sent when the first one has come."""
        if self._answer.usage_continuous:
            more["usage"] = self._usage_of(index, 0)
        return self._frame.chunk(choice, **more)

    def _text_chunk(self, output: ChoiceOutput) -> bytes:
        """A chunk with nothing but text, if there is some. All around the text is made once a choice."""
        if not output.text:
            return b""
        index, text = output.index, encode_json(output.text)
        if self._answer.usage_continuous:
            before, after = self.text_item
            return self._chunk(index, before % index + text + after)
        if index not in self._ends:
            before, after = self.text_item
            self._ends[index] = self._frame.around(before % index, after)
        before, after = self._ends[index]
        return before + text + after

    # Whole

    def whole(self, choices: list[ChoiceOutput]) -> bytes:
        """Choices are encoded one by one, so that the objects of one exist at a time."""
        return encode_json(
            {
                "id": self._id,
                "object": self.whole_object,
                "created": self._generation.created,
                "model": self._task.model.name,
                "choices": [Raw(encode_json(self._whole_choice(index, choice))) for index, choice in enumerate(choices)],
                "service_tier": self._answer.service_tier or None,
                "system_fingerprint": self._fingerprint,
                "usage": self._whole_usage(),
                **self._times(),
                **self._whole_prompt(),
            }
        )

    @abstractmethod
    def _whole_choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        """One item of the whole answer's `choices`."""

    def _whole_prompt(self) -> dict[str, Any]:
        """Members of the whole answer that describe its prompt."""
        return {}

    def _prompt_logprobs(self, place: int) -> list[Json | None] | Raw:
        """The logprobs of prompt number `place`, in vLLM's form."""
        return self._generation.runs[place].logprobs.vllm(self._task.model.tokenizer)

    def _times(self) -> dict[str, Any]:
        return {"metrics": times_as_json(self._generation)} if self._shows_times else {}

    def _whole_usage(self) -> dict[str, Any]:
        return self._generation.usage.as_json(self._answer.usage_details)

    def _usage_of(self, index: int, num_tokens: int) -> dict[str, Any]:
        """The usage of one choice, with its own prompt's tokens."""
        return Usage(len(self._task.prompts[index // self._task.n].token_ids), num_tokens).as_json()
