"""The look of responses: OpenAI's response object, and the numbered events of its streams."""

from __future__ import annotations

from typing import Any, ClassVar

from api.errors import ApiError, BadRequest, Conflict, ServiceUnavailable
from api.request.kept_response import KeptResponse
from api.request.response_schemas import ID_PREFIX
from api.request.response_tools import namespaces
from api.response.answer_format import AnswerFormat
from api.response.chunk_format import LONG_TOKENS, encode_json
from api.response.generation import Generation
from api.response.logprobs import LogprobsFormatter
from api.response.message_parts import MessageReader
from api.response.output_items import Event, OutputItems
from api.response.output_processor import ChoiceOutput
from api.response.stream_position import StreamPosition
from engine.config import ApiConfig
from engine.protocol import FinishReason

LONG_TEXT = 2048  # characters whose events take some milliseconds
STATUSES = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}


class ResponseFormat(AnswerFormat):
    """An answer of one choice. Its events are numbered, and each output makes its own: merged outputs are told one by one."""

    opens_at_once: ClassVar = True
    tells_each_output: ClassVar = True

    def __init__(self, generation: Generation, config: ApiConfig, position: StreamPosition | int | None = None) -> None:
        """`position`: the number of the last event that a client has; other values: it has none."""
        self._generation = generation
        self._task = task = generation.task
        self._starting_after = position if isinstance(position, int) else -1
        self._number = 0  # of the next event
        self._kept = KeptResponse.decoded(task.kept_body)
        request_id = generation.internal_ids[0]
        self._id = ID_PREFIX + request_id
        self._is_open = False  # the last of the opening events was made
        wanted, formatter = task.answer.logprobs, LogprobsFormatter(task.model.tokenizer, task.answer.tokens_as_ids)
        shown = None if wanted is None else lambda entries: formatter.chat(entries, wanted)["content"]
        reader, names = MessageReader(task.answer, request_id, 0), namespaces(self._kept.shown["tools"])
        self._output = OutputItems(reader, request_id, shown, names)
        self._reason = FinishReason.STOP  # of the choice, once it has ended

    @classmethod
    def position(cls, last: str | None, num_choices: int) -> int:
        if last is None:
            return -1
        if not last.isascii() or not last.isdecimal() or len(last) > 18:
            raise BadRequest("starting_after must be the sequence_number of an event.", param="starting_after")
        return int(last)

    # Streamed

    def opening(self) -> bytes:
        if not self._task.background:
            return self._state_event("created", "in_progress") + self._in_progress()
        return self._state_event("created", "queued") + self._state_event("queued", "queued")

    def _in_progress(self) -> bytes:
        self._is_open = True
        return self._state_event("in_progress", "in_progress")

    def chunks(self, output: ChoiceOutput) -> bytes:
        events = b"" if self._is_open else self._in_progress()
        return events + b"".join(map(self._told, self._read(output)))

    def is_long(self, output: ChoiceOutput) -> bool:
        num_logprobs = len(output.logprobs) * len(output.logprobs[0].token_ids) if output.logprobs else 0
        return len(output.text) > LONG_TEXT or num_logprobs > LONG_TOKENS

    def _read(self, output: ChoiceOutput) -> list[Event]:
        events = [event for piece in output.pieces or (output,) for event in self._output.take(piece)]
        if output.finish_reason is not None:
            self._reason = output.finish_reason
            events += self._output.close("completed" if self._reason is FinishReason.STOP else "incomplete")
        return events

    def closing(self) -> bytes:
        status = STATUSES[self._reason]
        return self._state_event("completed" if status == "completed" else "incomplete", status)

    def failure(self, error: ApiError) -> bytes:
        """The response may go on where the stream cannot: then the event is no part of the response, and has the number before."""
        if isinstance(error, Conflict | ServiceUnavailable):
            facts = {"code": error.type, "message": error.message, "param": error.param}
            return self._event("error", {**facts, "sequence_number": max(0, self._number - 1)})
        events = self._output.close("incomplete")
        failed = {"response": self._object("failed", error), "sequence_number": 0}
        return b"".join(map(self._told, [*events, ("failed", failed)]))

    def _state_event(self, type: str, status: str) -> bytes:
        return self._told((type, {"response": self._object(status)}))

    def _told(self, event: Event) -> bytes:
        """An event with the next number. Empty where the client has it."""
        type, members = event
        number, self._number = self._number, self._number + 1
        return b"" if number <= self._starting_after else self._event(f"response.{type}", {**members, "sequence_number": number})

    def _event(self, type: str, members: dict[str, Any]) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (type.encode(), encode_json({"type": type, **members}))

    # Whole

    def whole(self, choices: list[ChoiceOutput]) -> bytes:
        self._read(choices[0])
        return encode_json(self._object(STATUSES[self._reason]))

    def unfinished(self, status: str) -> bytes:
        """The response as it is before its end: "queued" or "in_progress"."""
        return encode_json(self._object(status))

    def failed(self, output: ChoiceOutput, error: ApiError) -> bytes:
        """A response that broke off behind `output`. One that was aborted is cancelled."""
        self._read(output)
        self._output.close("incomplete")
        return encode_json(self._object("cancelled") if isinstance(error, Conflict) else self._object("failed", error))

    @property
    def items(self) -> list[dict[str, Any]]:
        """The output so far."""
        return self._output.items

    def _object(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        sampling, shown = self._task.sampling[0], self._kept.shown
        has_ended = status not in ("queued", "in_progress")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._generation.created,
            "status": status,
            "completed_at": self._completed_at() if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._task.model.name,
            "output": self._output.items if has_ended else [],
            "usage": self._usage() if has_ended else None,
            "conversation": None,
            "prompt": None,
            "prompt_cache_retention": None,
            "service_tier": self._task.answer.service_tier or "default",
            **shown,
            "temperature": sampling.temperature if shown["temperature"] is None else shown["temperature"],
            "top_p": sampling.top_p if shown["top_p"] is None else shown["top_p"],
        }

    def _completed_at(self) -> int | None:
        final = self._generation.runs[0].final
        return int(final.times.finished) if final is not None and final.times.finished else None

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _error(error: ApiError) -> dict[str, str]:
    return {"code": "invalid_prompt" if isinstance(error, BadRequest) else "server_error", "message": error.message}
