"""From the body of a chat completion to its `Task`. Runs on a thread or in a reader process."""

from __future__ import annotations

from msgspec.structs import replace

from api.errors import BadRequest
from api.model_files import ServedModel
from api.preparation.answer_options import answer_options
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.request.prompts import Prompt, Truncation, check_truncation, render_chat, tokenize_text
from api.request.reasoning import grammar_behind, thinking_budget, thought_of
from api.request.sampling_params import (
    OutputBudget,
    check_budget,
    check_logprobs,
    default_max_tokens,
    make_sampling_params,
)
from api.request.schemas import ChatCompletionRequest, TemplateFields
from api.request.tools import AUTO, check_tools_are_served, tool_use
from api.request.validation import check_chat
from api.text.chat_template import ChatTemplate
from api.tools.formats import FORMATS, ToolFormat

ENDPOINT = "/v1/chat/completions"
ROLE = "assistant"


def prepare_chat(body: ChatCompletionRequest, model: ServedModel, rules: RequestRules, endpoint: str = ENDPOINT) -> Task:
    """`endpoint`: whose answers are written of it, where another one's body became this one. Raises BadRequest."""
    check_chat(body, rules.limits)
    check_tools_are_served(body, rules.tool_call_parser)
    budget = OutputBudget(body.max_tokens)
    if body.max_completion_tokens is not None:
        budget = OutputBudget(body.max_completion_tokens, "max_completion_tokens")
    check_budget(budget, model.limits)
    check_truncation(body.truncate_prompt_tokens, model.limits)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    check_logprobs("top_logprobs", logprobs, model.limits)
    tools = tool_use(body, _tool_format(model, rules), model.tokenizer)
    text = chat_text(body, model, rules)
    thought = thought_of(reasoning_format(model, rules), text)
    grammar = grammar_behind(thought, tools.grammar, model.tokenizer.added_ids)
    prompt = _make_prompt(text, body, model)
    config = model.files.generation_config
    max_tokens = budget.resolve(len(prompt.token_ids), model.limits, default_max_tokens(config))
    sampling = make_sampling_params(
        body,
        model.tokenizer,
        model.limits,
        rules.limits,
        config,
        max_tokens,
        logprobs,
        body.prompt_logprobs,
        grammar,
        thinking_budget(body.thinking_token_budget, thought, model.tokenizer.added_ids),
    )
    rules.limits.check_logprobs(sampling, len(prompt.token_ids), max_tokens * sampling.n, model.limits.vocab_size)
    if body.echo:
        rules.limits.check_shown_prompts(len(prompt.token_ids), sampling.n)
    role = ROLE if body.add_generation_prompt else body.messages[-1].role
    return Task(
        endpoint=endpoint,
        model=model,
        prompts=[prompt],
        sampling=[sampling],
        answer=replace(
            answer_options(body, rules, logprobs),
            role=role,
            prefix=_continued(body, role) if body.echo else "",
            tool_format=tools.format.name if tools.format is not None else "",
            tools=tools.types,
            one_call=tools.one_call,
            reasoning_format=thought.format,
            reasoning_open=thought.is_open,
            reasoning_hidden=not body.include_reasoning,
        ),
        stream=bool(body.stream),
        priority=body.priority,
        tier=body.service_tier or "",
        cache_salt=body.cache_salt or "",
    )


def _tool_format(model: ServedModel, rules: RequestRules) -> ToolFormat | None:
    """In which the model writes calls; None: that is not known."""
    return model.files.tool_format if rules.tool_call_parser == AUTO else FORMATS.get(rules.tool_call_parser)


def reasoning_format(model: ServedModel, rules: RequestRules) -> str:
    """In which the model writes its reasoning; "": that is not known."""
    return model.files.reasoning_format if rules.reasoning_parser == AUTO else rules.reasoning_parser


def chat_text(body: TemplateFields, model: ServedModel, rules: RequestRules) -> str:
    """The prompt that the messages become. Special tokens that they spell are guarded where they are not trusted."""
    template = _template_for(body.chat_template, model, rules)
    if rules.special_tokens_in_messages:
        return render_chat(body, template, rules.template_defaults)
    return render_chat(body, template, rules.template_defaults, model.tokenizer.guarded)


def _template_for(source: str | None, model: ServedModel, rules: RequestRules) -> ChatTemplate:
    """The template to render with: the request's own, where that is trusted, else the model's. Raises BadRequest."""
    if source is not None:
        if not rules.trust_request_chat_template:
            message = "chat_template is refused: this server was not started with --trust-request-chat-template."
            raise BadRequest(message, param="chat_template")
        return ChatTemplate(source, model.files.template_variables)
    if model.files.template is None:
        fault = model.files.template_fault
        message = f"The model `{model.name}` cannot chat: {fault}. Start it with --chat-template, or use /v1/completions."
        raise BadRequest(message, param="messages")
    return model.files.template


def _make_prompt(text: str, body: ChatCompletionRequest, model: ServedModel) -> Prompt:
    truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side or "left")
    prompt = tokenize_text(text, model.tokenizer, model.limits, body.add_special_tokens, truncation)
    return prompt if body.return_prompt_text else Prompt(prompt.token_ids)


def _continued(body: ChatCompletionRequest, role: str) -> str:
    """The last message, when it is of the role that answers."""
    last = body.messages[-1]
    return last.content if last.role == role and isinstance(last.content, str) else ""
