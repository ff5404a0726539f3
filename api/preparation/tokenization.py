"""Answers of /tokenize and /detokenize, whole. Runs on a thread or in a reader process."""

from __future__ import annotations

import msgspec

from api.errors import BadRequest
from api.model_files import ServedModel
from api.preparation.chat import chat_text
from api.preparation.rules import RequestRules
from api.request.prompts import token_strings
from api.request.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from api.request.validation import check_template_fields


def tokenized(body: TokenizeChatRequest | TokenizeCompletionRequest, model: ServedModel, rules: RequestRules) -> bytes:
    """JSON. Raises BadRequest."""
    if isinstance(body, TokenizeChatRequest):
        check_template_fields(body)
        text = chat_text(body, model, rules)
    else:
        text = body.prompt
    token_ids = model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
    strings = token_strings(model.tokenizer, token_ids) if body.return_token_strs else None
    return msgspec.json.encode(
        {"count": len(token_ids), "max_model_len": model.limits.max_model_len, "tokens": token_ids, "token_strs": strings}
    )


def detokenized(body: DetokenizeRequest, model: ServedModel, rules: RequestRules) -> bytes:
    """JSON. Raises BadRequest."""
    if (largest := max(body.tokens, default=0)) >= model.limits.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param="tokens")
    return msgspec.json.encode({"prompt": model.tokenizer.decode(body.tokens)})
