"""The output of a request that dead engines have made, put together from what they left in Redis.

An engine that continues a request reads the output stored by checkpoints and the journals behind them. They hold the messages of
several engines to several API servers, which may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.protocol import FinishedOutput, OutputLogprobs, OutputPromptLogprobs, RequestTimes
from gpu.plan import Int32Array


@dataclass
class FoldedChoice:
    """What is known of one choice: a run of tokens from the first on, without a hole."""

    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: list[OutputLogprobs] = field(default_factory=list)  # of each token, in order; empty when not asked for
    end: FinishedOutput | None = None  # it had ended, and these are all its tokens


@dataclass
class FoldedOutput:
    """A request's output so far. All handles in it are those of the request's present attachment."""

    choices: list[FoldedChoice]  # [n]
    prompt_logprobs: list[OutputPromptLogprobs] = field(default_factory=list)  # in order, without a hole from position 1 on
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache answered in the first engine
    times: RequestTimes = field(default_factory=RequestTimes)  # of the first engine, as far as known
