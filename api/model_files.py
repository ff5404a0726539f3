"""A model's tokenizer and chat template, out of its `TokenizerBundle`. A broken file disables the features that need it only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from api.errors import BadRequest, UnusableModel, sanitize_message
from api.request.sampling_params import ModelLimits, usable_defaults
from api.text.chat_template import ChatTemplate
from api.text.reasoning import reasoning_format_of_template
from api.text.tokenizer import TextTokenizer
from api.tools.formats import ToolFormat, format_of_template
from engine.protocol import TokenizerBundle

logger = logging.getLogger("headrace.api")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFiles:
    """`template_fault` says why there is no template, "" where there is one. The last three are what all others are made of."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    template_fault: str
    tool_format: ToolFormat | None  # that the template tells the model to write; None: it tells none
    reasoning_format: str  # that it contains; "": none
    generation_config: dict[str, Any]
    template_variables: dict[str, Any]
    content_hash: str
    bundle: TokenizerBundle
    template_source: str | None


class ServedModel(msgspec.Struct, frozen=True):
    """A model with at least one live engine, as a request sees it."""

    name: str  # as the client calls it; where it names none, as the model is called first
    first_name: str  # label of metrics, whichever of its names a client uses
    canonical_name: str  # as its keys in Redis call it
    engine: str  # label of metrics: the slot where one engine serves the model, else "all"
    fingerprint: str  # short
    limits: ModelLimits
    takes_priorities: bool  # of its requests; else all are alike
    files: ModelFiles

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.files.tokenizer

    @property
    def outline(self) -> tuple[Any, ...]:
        """All fields but the files."""
        fields = (self.name, self.first_name, self.canonical_name, self.engine, self.fingerprint)
        return *fields, self.limits, self.takes_priorities


def make_model_files(model: str, content_hash: str, bundle: TokenizerBundle, template_source: str | None = None) -> ModelFiles:
    """`template_source` stands in for the model's own template. Raises UnusableModel where there is no tokenizer."""
    variables = _template_variables(bundle)
    source = template_source or bundle.chat_template or ""
    template, fault = _make_template(source, variables)
    if template is None:
        logger.warning("model %s cannot chat: %s", model, fault)
    defaults = usable_defaults(model, bundle.generation_config)
    tokenizer = _make_tokenizer(model, bundle)
    return ModelFiles(
        tokenizer,
        template,
        fault,
        format_of_template(source),
        reasoning_format_of_template(source),
        defaults,
        variables,
        content_hash,
        bundle,
        template_source,
    )


def _make_tokenizer(model: str, bundle: TokenizerBundle) -> TextTokenizer:
    try:
        return TextTokenizer(bundle)
    except BaseException as error:  # the library raises bare Exceptions, and panics, which are not even these
        raise UnusableModel(f"The tokenizer of `{model}` cannot be read: {sanitize_message(str(error))}") from error


def _make_template(source: str, variables: dict[str, Any]) -> tuple[ChatTemplate | None, str]:
    if not source:
        return None, "it has no chat template"
    try:
        return ChatTemplate(source, variables), ""
    except BadRequest as error:
        return None, f"its chat template is not valid ({error.message})"


def _template_variables(bundle: TokenizerBundle) -> dict[str, Any]:
    """Special tokens by name, as templates read them; tokenizer_config.json spells them as strings or objects."""
    variables: dict[str, Any] = {}
    for name in _SPECIAL_TOKENS:
        value = bundle.tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            variables[name] = content
    if bundle.bos_token is not None:
        variables["bos_token"] = bundle.bos_token
    if bundle.eos_token is not None:
        variables["eos_token"] = bundle.eos_token
    return variables
