"""Servers and tokenizers of the API's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.text.tokenizer import TextTokenizer
from engine.config import EngineConfig
from engine.protocol import TokenizerBundle
from engine.runtime.serving import tokenizer_bundle
from tests.api.live_server import LiveServer

NULL_ENGINE = ("--load-format", "null", "--max-model-len", "2048", "--num-gpu-blocks-override", "2000")
KEYS = {"alice": "key-a", "bob": "key-b", "ops": "key-o"}


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
    with LiveServer(smollm2_gguf, NULL_ENGINE) as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    """Steps of 20 ms, so that requests can be met while they run; keys of two tenants and an admin."""
    keys = ("--api-key", f"alice={KEYS['alice']}", "--api-key", f"bob={KEYS['bob']}", "--api-key", f"ops:admin={KEYS['ops']}")
    limits = ("--max-num-queued-reqs", "24", "--max-request-bytes", "100000")
    options = (*keys, *limits, "--sse-keep-alive-interval", "0.2", "--record-retention", "1000")
    engine = (*NULL_ENGINE, "--max-num-seqs", "8")
    with LiveServer(smollm2_gguf, engine, options, null="step_seconds=0.02") as server:
        yield server
