"""Times of one request as its answer carries them (`--enable-per-request-metrics`), under vLLM's names."""

from __future__ import annotations

from api.response.generation import Generation


def times_as_json(generation: Generation) -> dict[str, float | None]:
    """Milliseconds, and output tokens a second. None: there is no such number, because too few tokens came."""
    first, last = generation.first_output, max(choice.last_token for choice in generation.choices)
    num_tokens = generation.usage.completion_tokens
    seconds = last - first
    queued = [run.final.times for run in generation.runs if run.final is not None and run.final.times.scheduled]
    return {
        "time_to_first_token_ms": _ms(first - generation.arrival) if first else None,
        "generation_time_ms": _ms(seconds) if first else None,
        "queue_time_ms": _ms(max(times.scheduled - times.enqueued for times in queued)) if queued else None,
        "mean_itl_ms": _ms(seconds / (num_tokens - 1)) if num_tokens > 1 else None,
        "tokens_per_second": round((num_tokens - 1) / seconds, 3) if seconds > 0 else None,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * max(seconds, 0.0), 3)
