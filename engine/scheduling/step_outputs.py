"""The outputs of a step for requests: columns for sampled tokens, objects only for rare things."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.request import Request
from gpu.plan import Int32Array, PromptLogprobs, SampledLogprobs


@dataclass(slots=True)
class StepOutputs:
    """Column entry i: `token_ids[i]` is output number `offsets[i]` of choice `choices[i]` of request `handles[i]` at API server
    `clients[i]`. A request's end comes once: with its last token, or later where a step that is out still writes its blocks."""

    clients: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    handles: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    choices: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    offsets: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: list[tuple[Request, int, SampledLogprobs]] = field(default_factory=list)  # request, offset, logprobs
    prompt_logprobs: list[tuple[Request, PromptLogprobs]] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)  # got their first token
    finished: list[Request] = field(default_factory=list)  # ended, for whatever reason, and their blocks are free


def trim_prompt_logprobs(request: Request, told: PromptLogprobs) -> PromptLogprobs | None:
    """The part not told before: a preempted request computes its prompt again, in chunks that may be cut differently."""
    first = max(told.position, request.num_prompt_logprobs, 1)
    skipped, count = first - told.position, len(told.ranks)
    if skipped >= count:
        return None
    request.num_prompt_logprobs = told.position + count
    if skipped == 0:
        return told
    width = len(told.token_ids) // count
    return PromptLogprobs(
        row=told.row,
        position=first,
        token_ids=told.token_ids[skipped * width :],
        logprobs=told.logprobs[skipped * width :],
        ranks=told.ranks[skipped:],
    )
