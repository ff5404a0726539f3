"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.json_route import JsonRoute
from api.preparation.chat import prepare_chat
from api.request.schemas import ChatCompletionRequest
from api.response.chunk_format import AnswerFormat, encode_json
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput
from api.submit import generate
from engine.config import ApiConfig

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Continue a conversation")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    return await generate(request, body, prepare_chat, ChatFormat)


class ChatFormat(AnswerFormat):
    """Chunks and whole answers of chat completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_item = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
    no_text: ClassVar = {"delta": {}}

    def __init__(self, body: ChatCompletionRequest, generation: Generation, config: ApiConfig) -> None:
        text_only = not body.logprobs and not body.return_token_ids
        super().__init__(body, generation, config, text_only)
        self._body = body
        self._num_top = body.top_logprobs or 0

    def opening(self) -> Iterator[bytes]:
        for index in range(self._task.num_choices):
            more: dict[str, Any] = {}
            if index == 0 and self._body.return_token_ids:
                more["prompt_token_ids"] = list(self._task.prompts[0].token_ids)
            if index == 0 and self._body.return_prompt_text:
                more["prompt_text"] = self._task.prompts[0].text
            yield self._first(index, {"role": self._task.role, "content": ""}, **more)
        if self._task.answer_prefix:
            for index in range(self._task.num_choices):
                yield self._first(index, {"content": self._task.answer_prefix})

    def _first(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = encode_json({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        return self._opening_chunk(index, choice, **more)

    def _piece(self, output: ChoiceOutput) -> bytes:
        body = self._body
        if not (output.text or output.logprobs or (output.token_ids and body.return_token_ids)):
            return b""
        item: dict[str, Any] = {"index": output.index, "delta": {"content": output.text}, "logprobs": None, "finish_reason": None}
        if body.logprobs:
            item["logprobs"] = self._logprobs.chat(output.logprobs, self._num_top)
        if body.return_token_ids:
            item["token_ids"] = output.token_ids
        return self._chunk(output.index, encode_json(item))

    def _whole_prompt(self) -> dict[str, Any]:
        body, prompt = self._body, self._task.prompts[0]
        return {
            "prompt_logprobs": self._prompt_logprobs(0) if body.prompt_logprobs is not None else None,
            "prompt_token_ids": list(prompt.token_ids) if body.return_token_ids else None,
            **({"prompt_text": prompt.text} if body.return_prompt_text else {}),
        }

    def _whole_choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        assert choice.finish_reason is not None
        message = {
            "role": self._task.role,
            "content": self._task.answer_prefix + choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs.chat(choice.logprobs, self._num_top) if self._body.logprobs else None,
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
        }
