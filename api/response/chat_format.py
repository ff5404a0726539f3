"""The look of chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from api.response.chunk_format import ChunkFormat, encode_json
from api.response.generation import Generation
from api.response.message_parts import ChatDelta, MessageReader, has_parts, whole_message
from api.response.output_processor import ChoiceOutput
from api.response.stream_position import StreamPosition
from engine.config import ApiConfig

LONG_TEXT = 8192  # characters in which looking for the parts of a message takes some 10 milliseconds


class ChatFormat(ChunkFormat):
    """Chunks and whole answers of chat completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_item = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
    no_text: ClassVar = {"delta": {}}

    def __init__(self, generation: Generation, config: ApiConfig, position: StreamPosition | int | None = None) -> None:
        super().__init__(generation, config, position)
        answer = self._answer
        self._readers = [
            MessageReader(answer, generation.internal_ids[0], index)
            for index in range(self._task.num_choices if has_parts(answer) else 0)
        ]

    def chunks(self, output: ChoiceOutput) -> bytes:
        return self._chunks_of_parts(output) if self._readers else super().chunks(output)

    def is_long(self, output: ChoiceOutput) -> bool:
        return super().is_long(output) or (bool(self._readers) and len(output.text) > LONG_TEXT)

    def _chunks_of_parts(self, output: ChoiceOutput) -> bytes:
        """Those of the message's parts, each with its id where the stream can be continued."""
        position, reader = self._position, self._readers[output.index]
        deltas = reader.read(output, 0 if position is None else position.num_characters(output.index))
        if position is not None:
            output = position.untold(output)
        chunks = b""
        shown = output  # with its tokens and logprobs, in the first chunk
        for num_characters, delta in deltas or [ChatDelta(0, {})]:
            if chunk := self._chat_chunk(shown, delta):
                if position is not None:
                    position.tell(output, True, num_characters)
                    chunks += position.event_id()
                chunks += chunk
            shown = ChoiceOutput(output.index)
        if output.finish_reason is not None:
            if position is not None:
                position.tell_end(output.index)
                chunks += position.event_id()
            chunks += self._end(output)
        return chunks

    def _chat_chunk(self, output: ChoiceOutput, delta: dict[str, Any]) -> bytes:
        """A chunk that has `delta`, and of the output its tokens and logprobs. Empty where there is nothing to show."""
        answer = self._answer
        if not (delta or output.logprobs or (output.token_ids and answer.token_ids)):
            return b""
        if self._text_only and delta.keys() == {"content"}:
            return self._text_chunk(ChoiceOutput(output.index, delta["content"]))
        item: dict[str, Any] = {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if answer.logprobs is not None:
            item["logprobs"] = self._logprobs.chat(output.logprobs, answer.logprobs)
        if answer.token_ids:
            item["token_ids"] = output.token_ids
        return self._chunk(output.index, encode_json(item))

    def _finish_reason(self, output: ChoiceOutput) -> str:
        return self._readers[output.index].finish_reason(output.finish_reason) if self._readers else super()._finish_reason(output)

    def _opening(self) -> Iterator[bytes]:
        prompt = self._task.prompts[0]
        for index in range(self._task.num_choices):
            more: dict[str, Any] = {}
            if index == 0 and self._answer.token_ids:
                more["prompt_token_ids"] = list(prompt.token_ids)
            if index == 0 and prompt.text is not None:
                more["prompt_text"] = prompt.text
            yield self._first(index, {"role": self._answer.role, "content": ""}, **more)
        if self._answer.prefix:
            for index in range(self._task.num_choices):
                yield self._first(index, {"content": self._answer.prefix})

    def _first(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = encode_json({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        return self._opening_chunk(index, choice, **more)

    def _piece(self, output: ChoiceOutput) -> bytes:
        shows = output.text or output.logprobs or (output.token_ids and self._answer.token_ids)
        return self._chat_chunk(output, {"content": output.text}) if shows else b""

    def _whole_prompt(self) -> dict[str, Any]:
        answer, prompt = self._answer, self._task.prompts[0]
        return {
            "prompt_logprobs": self._prompt_logprobs(0) if answer.prompt_logprobs else None,
            "prompt_token_ids": list(prompt.token_ids) if answer.token_ids else None,
            **({"prompt_text": prompt.text} if prompt.text is not None else {}),
        }

    def _whole_choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        assert choice.finish_reason is not None
        answer = self._answer
        parts: dict[str, Any] = {"content": answer.prefix + choice.text, "reasoning": None}
        if self._readers:
            parts = whole_message(self._readers[index], choice, answer.prefix)
        message = {
            "role": answer.role,
            "content": parts.pop("content"),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **parts,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": None if answer.logprobs is None else self._logprobs.chat(choice.logprobs, answer.logprobs),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if answer.token_ids else None,
        }
