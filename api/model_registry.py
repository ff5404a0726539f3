"""The models that can be asked for now: a name to engines, limits, tokenizer and chat template.

Engines put their tokenizer into Redis under its content hash; what was made of it is kept as long as the process lives.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from api.errors import RETRY_AFTER, BadRequest, ConfigurationError, NotFound, ServiceUnavailable, UnusableModel
from api.model_files import ModelFiles, ServedModel, make_model_files
from api.request.sampling_params import ModelLimits
from api.request.tools import AUTO
from api.text.chat_template import ChatTemplate
from engine.bus.call import BusUnavailable
from engine.client.client import AsyncClient
from engine.client.discovery import ModelHandle
from engine.config import ApiConfig

T = TypeVar("T")
logger = logging.getLogger("headrace.api")

NO_ENGINE = "No engine serves this model now. Try again later."


@lru_cache(maxsize=64)
def _short_fingerprint(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:8]


class ServedModels:
    """`pool` runs what would hold up the event loop: reading a large tokenizer takes a second. Raises ConfigurationError."""

    def __init__(self, config: ApiConfig, pool: Executor) -> None:
        self.template_defaults = _template_defaults(config)
        self._template_source = _template_source(config)
        self._tool_call_parser = config.tool_call_parser
        self._pool = pool
        self._files: dict[str, asyncio.Task[ModelFiles]] = {}
        self._seen: set[str] = set()

    def names(self, client: AsyncClient) -> dict[str, ModelHandle]:
        """The names clients use, each with its model: models in order of their canonical names, a model's names as they were given.
        Models that had an engine within the failover time are among them. A canonical name is no alias where a model has others."""
        named: dict[str, ModelHandle] = {}
        for handle in client.directory.models.values():
            for engine in handle.engines:
                for name in engine.served_names or [handle.name]:
                    named.setdefault(name, handle)
        self._seen |= named.keys()
        return named

    def known(self, client: AsyncClient, served_name: str | None = None) -> list[str]:
        """Canonical names: of all models that Redis knows, with an engine or not, or of the one served under a name. Raises
        NotFound."""
        known = client.directory.known_models
        if served_name is None:
            return sorted(known)
        handle = self.names(client).get(served_name)
        if handle is None and served_name not in known:
            raise NotFound(f"The model `{served_name}` does not exist.", param="model")
        return [served_name if handle is None else handle.name]

    def missing(self, client: AsyncClient) -> list[str]:
        """Names that were served since this process started and have no live engine now."""
        return sorted(self._seen - {name for name, handle in self.names(client).items() if handle.is_live})

    async def resolve(self, client: AsyncClient, name: str | None) -> ServedModel:
        """The model that a request asks for. Raises NotFound, ServiceUnavailable, or BadRequest where it must be named."""
        named = self.names(client)
        if not name:
            if not named:
                raise ServiceUnavailable(NO_ENGINE, headers=RETRY_AFTER)
            handles = {handle.name for handle in named.values()}
            if len(handles) > 1:
                raise BadRequest(
                    f"`model` is required: this server has {', '.join(f'`{each}`' for each in sorted(named))}.", param="model"
                )
            name = next(iter(named))
        handle = named.get(name)
        if handle is None:
            if name in self._seen or not named:
                raise ServiceUnavailable(NO_ENGINE, headers=RETRY_AFTER)
            aliases = ", ".join(f"`{each}`" for each in sorted(named))
            raise NotFound(f"The model `{name}` does not exist. Valid aliases: {aliases}.", param="model")
        engines = handle.engines
        return ServedModel(
            name,
            next(iter(engines[0].served_names), handle.name),
            handle.name,
            engines[0].slot if len(engines) == 1 else "all",  # which of several ran a request is not known here
            _short_fingerprint(engines[0].fingerprint),
            ModelLimits(handle.max_model_len, handle.vocab_size, handle.max_logprobs),
            handle.takes_priorities,
            await self._load(client, handle),
        )

    async def prepare(self, client: AsyncClient) -> None:
        """Make ready what has a live engine, so that its first request does not wait for a tokenizer. Models that cannot be made
        ready are logged."""
        for handle in self.names(client).values():
            if handle.tokenizer not in self._files:
                try:
                    await self._load(client, handle)
                except (ServiceUnavailable, BusUnavailable) as error:
                    logger.warning("model %s could not be made ready, trying again: %s", handle.name, error)
                except Exception as error:
                    logger.error("model %s cannot be made ready: %s", handle.name, error)

    async def _load(self, client: AsyncClient, handle: ModelHandle) -> ModelFiles:
        """Read each tokenizer once, however many requests ask for it at the same time. Only the failure of broken files is kept."""
        task = self._files.get(handle.tokenizer)
        if task is None:
            task = self._files[handle.tokenizer] = asyncio.create_task(self._read(client, handle))
        try:
            return await asyncio.shield(task)
        except UnusableModel as error:
            raise UnusableModel(error.message) from None
        except Exception:
            self._files.pop(handle.tokenizer, None)
            raise

    async def _read(self, client: AsyncClient, handle: ModelHandle) -> ModelFiles:
        try:
            bundle = await client.tokenizer_bundle(handle)
        except LookupError as error:
            raise ServiceUnavailable(str(error), headers=RETRY_AFTER) from error
        files = await self.in_thread(make_model_files, handle.name, handle.tokenizer, bundle, self._template_source)
        if self._tool_call_parser == AUTO and files.tool_format is not None:
            logger.info("model %s: its chat template tells the tool call format %s", handle.name, files.tool_format.name)
        return files

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)


def _template_defaults(config: ApiConfig) -> dict[str, Any]:
    if not config.default_chat_template_kwargs:
        return {}
    try:
        value = json.loads(config.default_chat_template_kwargs)
    except ValueError as error:
        raise ConfigurationError(f"--default-chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError("--default-chat-template-kwargs must be a JSON object")
    return value


def _template_source(config: ApiConfig) -> str | None:
    if not config.chat_template:
        return None
    try:
        source = Path(config.chat_template).read_text(encoding="utf-8")
        ChatTemplate(source)
    except (OSError, UnicodeError, BadRequest) as error:
        raise ConfigurationError(f"--chat-template {config.chat_template}: {error}") from error
    return source
