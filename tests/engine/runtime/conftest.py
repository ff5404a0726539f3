from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.runtime.core import EngineCore
from tests.engine.conftest import null_config


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    """Of a null model, whose prompts come in chunks."""
    core = EngineCore(null_config(max_num_batched_tokens=32))
    yield core
    core.shutdown()
