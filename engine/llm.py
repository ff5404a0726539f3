"""Offline use: a model in this process, driven step by step by the caller. No Redis, no HTTP.

from engine.llm import LLM
from engine.protocol import SamplingParams
llm = LLM("path/to/model")
print(llm.generate("The headrace leads water", SamplingParams(temperature=0.0, max_tokens=32))[0].choices[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from engine.config import EngineConfig, SchedulerConfig
from engine.protocol import PROTOCOL_VERSION, EngineCoreRequest, decode_request, encode, encode_column
from engine.runtime.core import EngineCore
from engine.scheduling.request import Request
from engine.scheduling.step_outputs import StepOutputs
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.config import CacheConfig, ModelConfig, ParallelConfig
from gpu.plan import PromptLogprobs, SampledLogprobs, SamplingParams


@dataclass
class Choice:
    """One finished answer."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[SampledLogprobs] = field(default_factory=list)


@dataclass
class Completion:
    """A prompt with its answers, `sampling.n` of them."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0


class LLM:
    """A model, its scheduler and its workers behind one blocking call.

    Options are the fields of the configuration sections by name (`max_model_len=2048`, `tensor_parallel_size=2`, ...).
    The worker lives in this process unless `distributed_executor_backend="mp"` or tensor parallelism asks for processes.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = _configure(model, options)
        self.core = EngineCore(config)
        self._files = load_tokenizer_files(model) if config.model.load_format != "null" else None
        self._tokenizer = Tokenizer.from_str(self._files.tokenizer_json) if self._files else None
        self._ids = itertools.count()

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run prompts (text, or token ids) to their ends, together, and return their answers in order."""
        many: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = [sampling or SamplingParams()] * len(many) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts with {len(params)} SamplingParams")
        requests = [self._make(prompt, one) for prompt, one in zip(many, params, strict=True)]  # all can run, or none is added
        answers = {}
        for choices in requests:
            answers[choices[0].handle] = Completion(
                choices[0].prompt_token_ids.tolist(), [Choice(request.choice) for request in choices]
            )
            for request in choices:
                self.core.add_request(request)
        while (outputs := self.core.step()) is not None:
            self._collect(outputs, answers)
        return list(answers.values())

    def _make(self, prompt: str | Sequence[int], sampling: SamplingParams) -> list[Request]:
        """Checked as what comes over the bus is. Raises ValueError."""
        token_ids = np.asarray(self._encode(prompt), dtype=np.int32)
        if not sampling.eos_token_ids and self._files is not None:
            sampling = msgspec.structs.replace(sampling, eos_token_ids=self._files.eos_token_ids)
        handle, now = next(self._ids), self.core.clock()
        source = EngineCoreRequest(PROTOCOL_VERSION, f"offline-{handle}", encode_column(token_ids), sampling, "", handle)
        return self.core.make_requests(decode_request(encode(source)), now, now)

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ValueError("the null model has no tokenizer: pass token ids")
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    def _collect(self, outputs: StepOutputs, answers: dict[int, Completion]) -> None:
        columns = (outputs.handles.tolist(), outputs.choices.tolist(), outputs.token_ids.tolist())
        for handle, choice, token_id in zip(*columns, strict=True):
            answers[handle].choices[choice].token_ids.append(token_id)
        for request, _, logprobs in outputs.logprobs:
            answers[request.handle].choices[request.choice].logprobs.append(logprobs)
        for request, prompt_logprobs in outputs.prompt_logprobs:
            answers[request.handle].prompt_logprobs.append(prompt_logprobs)
        for request in outputs.finished:
            answer = answers[request.handle]
            answer.num_cached_tokens = max(answer.num_cached_tokens, request.num_cached_tokens)
            choice = answer.choices[request.choice]
            choice.finish_reason = str(request.finish_reason)
            choice.stop_reason, choice.error = request.stop_reason, request.error
            if self._tokenizer is not None:
                choice.text = self._tokenizer.decode(choice.token_ids, skip_special_tokens=True)

    def close(self) -> None:
        self.core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _configure(model: str, options: dict[str, Any]) -> EngineConfig:
    """Options by field name into their sections. Raises TypeError for one that no section has."""
    config = EngineConfig(ModelConfig(model=model), CacheConfig(), ParallelConfig(), SchedulerConfig())
    sections = (config.model, config.cache, config.parallel, config.scheduler)
    if options.get("tensor_parallel_size", 1) == 1:
        config.parallel.distributed_executor_backend = "uni"
    for name, value in options.items():
        section = next((each for each in sections if name in {field.name for field in fields(each)}), None)
        if section is None:
            raise TypeError(f"LLM has no option {name!r}")
        setattr(section, name, value)
    return config
