"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.app_state import service_of
from api.http.json_route import JsonRoute
from api.preparation.chat import prepare_chat
from api.request.schemas import ChatCompletionRequest
from api.response.answer import answer
from api.response.chunk_format import AnswerFormat, WholeChoice
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput
from api.response.sse import encode_json
from api.submit import admit, answer_headers, submit
from engine.config import ApiConfig

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Continue a conversation")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    service = service_of(request)
    admit(service)
    model = await service.models.resolve(service.client, body.model)
    task = await service.prepare(request, prepare_chat, body, model)
    generation = await submit(request, task, body.request_id)
    format = ChatFormat(body, generation, service.config)
    return await answer(request, generation, format, answer_headers(generation), service.config.sse_keep_alive_interval)


class ChatFormat(AnswerFormat):
    """Chunks and whole answers of chat completions."""

    text_item = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'

    def __init__(self, body: ChatCompletionRequest, generation: Generation, config: ApiConfig) -> None:
        super().__init__(body, generation, config, "chatcmpl", "chat.completion.chunk")
        self._body = body
        self.text_only = not body.logprobs and not body.return_token_ids
        self._num_top = body.top_logprobs or 0

    def opening(self) -> Iterator[bytes]:
        for index in range(self._task.num_choices):
            more: dict[str, Any] = {}
            if index == 0 and self._body.return_token_ids:
                more["prompt_token_ids"] = list(self._task.prompts[0].token_ids)
            if index == 0 and self._body.return_prompt_text:
                more["prompt_text"] = self._task.prompts[0].text
            yield self._choice(index, {"role": self._task.role, "content": ""}, **more)
        if self._task.answer_prefix:
            for index in range(self._task.num_choices):
                yield self._choice(index, {"content": self._task.answer_prefix})

    def chunks(self, output: ChoiceOutput) -> Iterable[bytes]:
        """Text and what belongs to it in one chunk, the end in one of its own, which strict clients need."""
        chunks = []
        if output.text or output.logprobs or (output.token_ids and self._body.return_token_ids):
            chunks.append(self._text(output))
        if output.finish_reason is not None:
            choice = {
                "index": output.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": str(output.finish_reason),
                "stop_reason": output.stop_reason,
            }
            chunks.append(self._last_chunk(output.index, encode_json(choice)))
        return chunks

    def _text(self, output: ChoiceOutput) -> bytes:
        if self.text_only:
            return self._text_chunk(output)
        logprobs = self._logprobs.chat(output.logprobs, self._num_top) if self._body.logprobs else None
        extra = {"token_ids": output.token_ids} if self._body.return_token_ids else {}
        choice = encode_json(
            {"index": output.index, "delta": {"content": output.text}, "logprobs": logprobs, "finish_reason": None, **extra}
        )
        return self._chunk(output.index, choice)

    def _choice(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = encode_json({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        return self._chunk(index, choice, **more)

    def whole(self, choices: list[WholeChoice]) -> bytes:
        body, generation, prompt = self._body, self._generation, self._task.prompts[0]
        prompt_logprobs = (
            generation.prompt_logprobs[0].vllm(self._task.model.tokenizer) if body.prompt_logprobs is not None else None
        )
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": generation.created,
            "model": self._task.model.name,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._whole_usage(),
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": list(prompt.token_ids) if body.return_token_ids else None,
        }
        if body.return_prompt_text:
            answer["prompt_text"] = prompt.text
        return encode_json(answer)

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
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
