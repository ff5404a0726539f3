"""When a sampled token ends its request: EOS, the client's stop tokens, caps, in this order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.protocol import FinishReason
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stop_check import StopTokens
from gpu.plan import ModelRunnerOutput
from tests.engine.scheduling.harness import Engine, make_request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def sample(scheduler: Scheduler, token_ids: list[int]) -> list[tuple[FinishReason | None, int | str | None]]:
    """Steps of a lone request that samples these; how it had ended after each."""
    (request,) = scheduler.requests.values()
    ends = []
    for token_id in token_ids:
        plan = scheduler.schedule(0.0)
        output = ModelRunnerOutput(plan.step, plan.rows, np.array([token_id], np.int32), [], [], {}, 0.0)
        outputs = scheduler.update_from_output(plan, output, 0.0)
        assert outputs.token_ids.tolist() == [token_id], "the token that ends a request is part of its output"
        assert outputs.finished == ([request] if request.status.finished else [])
        ends.append((request.finish_reason, request.stop_reason))
    return ends


GOES_ON = (None, None)


@pytest.mark.parametrize(
    ("sampling", "token_ids", "ends"),
    [
        ({"eos_token_ids": [2]}, [5, 2], [GOES_ON, (STOP, None)]),
        ({"eos_token_ids": [2, 7]}, [7], [(STOP, None)]),
        ({"eos_token_ids": [2], "ignore_eos": True}, [2, 2, 2, 2], [GOES_ON] * 3 + [(LENGTH, None)]),
        ({"stop_token_ids": [9]}, [5, 9], [GOES_ON, (STOP, 9)]),
        ({"stop_token_ids": [9], "ignore_eos": True}, [9], [(STOP, 9)]),
        ({"eos_token_ids": [2], "stop_token_ids": [2]}, [2], [(STOP, None)]),
        ({"eos_token_ids": [2], "stop_token_ids": [2], "ignore_eos": True}, [2], [(STOP, 2)]),
        ({"max_tokens": 1}, [5], [(LENGTH, None)]),
        ({"max_tokens": 2, "eos_token_ids": [2]}, [5, 2], [GOES_ON, (STOP, None)]),
        ({"min_tokens": 3, "eos_token_ids": [2], "stop_token_ids": [9]}, [2, 9, 9], [GOES_ON, GOES_ON, (STOP, 9)]),
        ({"min_tokens": 2, "max_tokens": 2, "eos_token_ids": [2]}, [2, 5], [GOES_ON, (LENGTH, None)]),
        ({"min_tokens": 9, "max_tokens": 2, "eos_token_ids": [2]}, [2, 2], [GOES_ON, (LENGTH, None)]),
        ({"max_tokens": 99, "max_model_len": 10}, [5, 5], [GOES_ON, (LENGTH, None)]),
    ],
)
def test_a_request_ends_at_the_right_token_for_the_right_reason(
    sampling: dict[str, Any], token_ids: list[int], ends: list[Any]
) -> None:
    engine = Engine(max_model_len=sampling.pop("max_model_len", 128))
    engine.add(make_request("a", 8, **{"ignore_eos": False, "max_tokens": 4, **sampling}))
    assert sample(engine.scheduler, token_ids) == ends
    engine.scheduler.check_integrity()


def test_another_request_s_stop_token_ends_nobody_else() -> None:
    engine = Engine()
    engine.add(make_request("a", 4, stop_token_ids=[9]), make_request("b", 4))
    plan = engine.scheduler.schedule(0.0)
    output = ModelRunnerOutput(plan.step, plan.rows, np.array([9, 9], np.int32), [], [], {}, 0.0)
    finished = engine.scheduler.update_from_output(plan, output, 0.0).finished
    assert [request.request_id for request in finished] == ["a"]


def test_candidates_follow_the_live_requests_whatever_the_ids() -> None:
    stops = StopTokens()
    token_ids = np.array([0, 3, 5, 1_000_000, 2_000_000], np.int32)
    assert not stops.candidates(token_ids).any()
    first = make_request("a", eos_token_ids=[3], stop_token_ids=[1_000_000], ignore_eos=False)
    second = make_request("b", eos_token_ids=[3], stop_token_ids=[0, -1], ignore_eos=False)
    third = make_request("c", eos_token_ids=[5], ignore_eos=True)
    for request in (first, second, third):
        stops.add(request)
    assert stops.candidates(token_ids).tolist() == [True, True, False, True, False]
    stops.remove(first)
    assert stops.candidates(token_ids).tolist() == [True, True, False, False, False]
    stops.remove(second)
    stops.remove(third)
    assert not stops.candidates(token_ids).any()
