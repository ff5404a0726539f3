"""The look of an answer: what the endpoints' formats have in common, the chunks' frame, usage and logprobs' spelling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from api.request.schemas import SamplingFields
from api.response.generation import Generation
from api.response.logprobs import LogprobsFormatter
from api.response.output_processor import ChoiceOutput, TokenLogprobs
from api.response.sse import ChunkFrame, encode_json
from api.version import system_fingerprint
from engine.config import ApiConfig
from engine.protocol import FinishReason


@dataclass(slots=True)
class WholeChoice:
    """All outputs of one choice, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class UsageOptions:
    """`at_end`: a last chunk with the usage; `continuous`: usage in every chunk; `details`: cached tokens too."""

    at_end: bool = False
    continuous: bool = False
    details: bool = False

    @classmethod
    def of(cls, request: SamplingFields, config: ApiConfig) -> UsageOptions:
        details = config.enable_prompt_tokens_details
        if config.enable_force_include_usage:
            return cls(True, True, details)
        options = request.stream_options
        if options is None or not options.include_usage:
            return cls(details=details)
        return cls(True, options.continuous_usage_stats, details)


class AnswerFormat(ABC):
    """`prefix`: of the answer's id, before the client's; `chunk`: what a chunk calls itself."""

    text_item: tuple[bytes, bytes]
    """The item of a chunk of text alone, before and behind the text; `%d` is the choice's index."""
    text_only: bool
    """Neither logprobs nor token ids are asked for."""

    def __init__(self, body: SamplingFields, generation: Generation, config: ApiConfig, prefix: str, chunk: str) -> None:
        self._generation = generation
        self._task = task = generation.task
        self._usage = UsageOptions.of(body, config)
        as_ids = body.return_tokens_as_token_ids
        self._logprobs = LogprobsFormatter(task.model.tokenizer, config.return_tokens_as_token_ids if as_ids is None else as_ids)
        self._fingerprint = system_fingerprint(task.model.fingerprint)
        self._id = f"{prefix}-{generation.external_id}"
        self._frame = ChunkFrame(self._id, chunk, generation.created, task.model.name)
        self._ends: dict[int, tuple[bytes, bytes]] = {}  # by choice: a chunk of text before and behind the text

    @abstractmethod
    def opening(self) -> Iterable[bytes]:
        """Chunks before the first output."""

    @abstractmethod
    def chunks(self, output: ChoiceOutput) -> Iterable[bytes]:
        """Chunks of one output."""

    def closing(self) -> Iterator[bytes]:
        """Chunks behind the last output."""
        if self._usage.at_end:
            yield self._frame.chunk(b"", usage=self._whole_usage(), system_fingerprint=self._fingerprint)

    @abstractmethod
    def whole(self, choices: list[WholeChoice]) -> bytes:
        """The answer in one piece, JSON."""

    def _chunk(self, index: int, choice: bytes, **more: Any) -> bytes:
        """A chunk about choice `index`, which is `choice`, encoded."""
        if self._usage.continuous:
            more["usage"] = self._generation.usage_of(index).as_json()
        return self._frame.chunk(choice, **more)

    def _text_chunk(self, output: ChoiceOutput) -> bytes:
        """A chunk with nothing but text. All around the text is made once a choice."""
        index, text = output.index, encode_json(output.text)
        if self._usage.continuous:
            before, after = self.text_item
            return self._chunk(index, before % index + text + after)
        before, after = self._ends_of(index)
        return before + text + after

    def _ends_of(self, index: int) -> tuple[bytes, bytes]:
        if index not in self._ends:
            before, after = self.text_item
            self._ends[index] = self._frame.around(before % index, after)
        return self._ends[index]

    def text_ends(self) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text in the chunks of choice 0. None where chunks have more in them than text."""
        return self._ends_of(0) if self.text_only and not self._usage.continuous else None

    def _last_chunk(self, index: int, choice: bytes) -> bytes:
        """The chunk that ends choice `index`. Where no usage comes behind, it has the fingerprint."""
        more = {} if self._usage.at_end else {"system_fingerprint": self._fingerprint}
        return self._chunk(index, choice, **more)

    def _whole_usage(self) -> dict[str, Any]:
        return self._generation.usage.as_json(self._usage.details)
