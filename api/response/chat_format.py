"""The look of chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from api.response.chunk_format import AnswerFormat, encode_json
from api.response.output_processor import ChoiceOutput


class ChatFormat(AnswerFormat):
    """Chunks and whole answers of chat completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_item = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
    no_text: ClassVar = {"delta": {}}

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
        answer = self._answer
        if not (output.text or output.logprobs or (output.token_ids and answer.token_ids)):
            return b""
        item: dict[str, Any] = {"index": output.index, "delta": {"content": output.text}, "logprobs": None, "finish_reason": None}
        if answer.logprobs is not None:
            item["logprobs"] = self._logprobs.chat(output.logprobs, answer.logprobs)
        if answer.token_ids:
            item["token_ids"] = output.token_ids
        return self._chunk(output.index, encode_json(item))

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
        message = {
            "role": answer.role,
            "content": answer.prefix + choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": None if answer.logprobs is None else self._logprobs.chat(choice.logprobs, answer.logprobs),
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if answer.token_ids else None,
        }
