"""The look of text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from api.response.chunk_format import ChunkFormat, encode_json
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput, TokenLogprobs
from api.response.stream_position import StreamPosition
from engine.config import ApiConfig


class CompletionFormat(ChunkFormat):
    """Chunks and whole answers of text completions."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    text_item = b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}'
    no_text: ClassVar = {"text": ""}

    def __init__(self, generation: Generation, config: ApiConfig, position: StreamPosition | int | None = None) -> None:
        super().__init__(generation, config, position)
        told = self._position
        self._begun = [told is not None and told.has_begun(index) for index in range(self._task.num_choices)]

    # Streamed

    def _opening(self) -> Iterable[bytes]:
        return ()

    def _num_logprobs(self, output: ChoiceOutput) -> int:
        own = super()._num_logprobs(output)
        if self._begun[output.index] or not self._answer.echo or self._answer.logprobs is None:
            return own
        return own + self._generation.runs[output.index // self._task.n].logprobs.num_logprobs

    def _piece(self, output: ChoiceOutput) -> bytes:
        """A choice's first one brings the echo, with the first tokens."""
        first = not self._begun[output.index]
        self._begun[output.index] = True
        if not (output.text or output.token_ids or first):
            return b""
        return self._chunk(output.index, encode_json(self._choice(output, first)))

    def _choice(self, output: ChoiceOutput, first: bool) -> dict[str, Any]:
        answer, prompt = self._answer, output.index // self._task.n
        text, entries = output.text, output.logprobs
        if first and answer.echo:
            text = self._generation.runs[prompt].echo_text() + text
            entries = [*self._prompt_entries(prompt), *entries]
        choice: dict[str, Any] = {"index": output.index, "text": text, "logprobs": None, "finish_reason": None}
        if answer.logprobs is not None:
            choice["logprobs"] = self._logprobs.completion(entries, answer.logprobs)
        if answer.token_ids:
            choice["token_ids"] = output.token_ids
            if first:
                choice["prompt_token_ids"] = list(self._task.prompts[prompt].token_ids)
        return choice

    # Whole

    def _whole_choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        assert choice.finish_reason is not None
        answer, place = self._answer, index // self._task.n
        text, entries = choice.text, choice.logprobs
        if answer.echo:
            text = self._generation.runs[place].echo_text() + text
            entries = [*self._prompt_entries(place), *entries]
        return {
            "index": index,
            "text": text,
            "logprobs": None if answer.logprobs is None else self._logprobs.completion(entries, answer.logprobs),
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if answer.token_ids else None,
            "prompt_logprobs": self._prompt_logprobs(place) if answer.prompt_logprobs else None,
            "prompt_token_ids": list(self._task.prompts[place].token_ids) if answer.token_ids else None,
        }

    def _prompt_entries(self, prompt: int) -> Sequence[TokenLogprobs]:
        if self._answer.logprobs is None:
            return []
        run = self._generation.runs[prompt]
        return run.logprobs.entries(self._task.model.tokenizer, run.echo_text())
