"""The records of each request: metrics as it goes, one log line at its end. Never a word of a prompt or an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from api.metrics.metrics import EndedPrompt, Metrics
from api.response.generation import Generation, PromptRun
from engine.protocol import FinishReason, SamplingParams

logger = logging.getLogger("headrace.request")


class RequestObserver:
    """`open`: the generations that have not been closed."""

    def __init__(self, metrics: Metrics) -> None:
        self.open: set[Generation] = set()
        self._metrics = metrics

    def opened(self, generation: Generation) -> None:
        self.open.add(generation)

    def first_output(self, generation: Generation, now: float) -> Callable[[float], None]:
        labels = _labels(generation)
        self._metrics.ttft.labels(*labels).observe(now - generation.arrival)
        return self._metrics.itl.labels(*labels).observe

    def choice_ended(self, generation: Generation, reason: FinishReason) -> None:
        self._metrics.choice_ended(*_labels(generation), reason)

    def closed(self, generation: Generation) -> None:
        """Each prompt is a request of its own to the metrics. Aborted ones are in every histogram that they have a number for."""
        self.open.discard(generation)
        now = time.time()
        for run, sampling in zip(generation.runs, generation.task.sampling, strict=True):
            latency = (run.ended_at or now) - generation.arrival
            self._metrics.prompt_ended(_labels(generation), _ended_prompt(run, sampling, latency))
        if logger.isEnabledFor(logging.INFO):
            logger.handle(_record("request finished", _facts(generation, now)))


class AttachedObserver:
    """Of generations that go on with a request of another HTTP request, whose API server counts it: these are open, and no more."""

    def __init__(self, observer: RequestObserver) -> None:
        self._open = observer.open

    def opened(self, generation: Generation) -> None:
        self._open.add(generation)

    def first_output(self, generation: Generation, now: float) -> Callable[[float], None]:
        return lambda seconds: None

    def choice_ended(self, generation: Generation, reason: FinishReason) -> None:
        pass

    def closed(self, generation: Generation) -> None:
        self._open.discard(generation)


def _ended_prompt(run: PromptRun, sampling: SamplingParams, latency: float) -> EndedPrompt:
    return EndedPrompt(
        num_tokens=len(run.prompt.token_ids),
        num_cached=run.final.num_cached_tokens if run.final is not None else 0,
        n=len(run.choices),
        max_tokens=sampling.max_tokens,
        output_lens=[choice.num_tokens for choice in run.choices],
        latency=latency,
        times=run.final.times if run.final is not None else None,
    )


def _record(message: str, facts: dict[str, object]) -> logging.LogRecord:
    """The record of `logger.info`, without its search of the stack for a line of code that is not shown."""
    record = logging.LogRecord(logger.name, logging.INFO, __file__, 0, message, (), None)
    record.__dict__.update(facts)
    return record


def _labels(generation: Generation) -> tuple[str, str]:
    model = generation.task.model
    return model.first_name, model.engine


def _facts(generation: Generation, now: float) -> dict[str, object]:
    """Fields of the log line. Durations are seconds."""
    task, usage = generation.task, generation.usage
    facts: dict[str, object] = {
        "request_id": generation.external_id,
        "internal_id": generation.internal_ids[0],
        "tenant": generation.tenant,
        "model": task.model.name,
        "endpoint": task.endpoint,
        "stream": task.stream,
        "num_prompts": len(task.prompts),
        "n": task.n,
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "finish_reason": ",".join(sorted({str(choice.finish_reason) for choice in generation.choices})),
        "duration": round(now - generation.arrival, 6),
    }
    if generation.first_output:
        facts["time_to_first_token"] = round(generation.first_output - generation.arrival, 6)
    if (final := generation.runs[0].final) is not None and final.times.scheduled:
        facts["queue_time"] = round(final.times.scheduled - final.times.enqueued, 6)
    return facts
