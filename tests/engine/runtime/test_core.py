"""The core by itself, with the null model: what its steps tell of whether it gets on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.runtime.core import EngineCore
from engine.scheduling.request import Request
from gpu.plan import SamplingParams
from tests.engine.conftest import null_config


@pytest.fixture(params=["uni", "mp"])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    core = EngineCore(null_config(request.param))
    yield core
    core.shutdown()


def test_an_idle_engine_has_no_step_started(core: EngineCore) -> None:
    """The heartbeat takes a step that started long ago for a loop that hangs."""
    assert core.step() is None
    assert core.step_started is None
    core.add_request(Request("r", np.arange(3, dtype=np.int32), SamplingParams(max_tokens=4, ignore_eos=True)))
    num_tokens = 0
    while (outputs := core.step()) is not None:
        num_tokens += len(outputs.token_ids)
        assert core.has_work or core.step_started is None
    assert num_tokens == 4
    assert core.step_started is None
