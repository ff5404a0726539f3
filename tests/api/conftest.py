"""Servers and tokenizers of the API's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.tokenizer import TextTokenizer
from engine.config import EngineConfig
from engine.process import tokenizer_bundle
from engine.protocol import TokenizerBundle
from tests.api.live_server import LiveServer


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path) -> TokenizerBundle:
    config = EngineConfig()
    config.model.model = str(smollm2_gguf)
    return tokenizer_bundle(config)


@pytest.fixture(scope="session")
def tokenizer(smollm2_bundle: TokenizerBundle) -> TextTokenizer:
    return TextTokenizer(smollm2_bundle)


@pytest.fixture(scope="session")
def null_server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    """Real processes and SmolLM2's tokenizer; tokens come from a hash instead of a model, so that everything else is fast."""
    engine = ("--load-format", "null", "--max-model-len", "2048", "--num-gpu-blocks-override", "2000")
    with LiveServer(smollm2_gguf, engine) as server:
        yield server
