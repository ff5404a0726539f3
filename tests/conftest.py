"""Fixtures that every house shares: a real Redis, the real model, a small random one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.redis_server import RedisServer, installed_servers

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test is timed: what a busy machine does slowly is not wrong. Each run of the suite tries the same examples, so that it does not
# fail for one that has nothing to do with a change. `make search` looks for new ones.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=3000)
hypothesis.settings.load_profile("fixed")

TEST_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """A fresh, empty database."""
    import redis

    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session", params=installed_servers(), ids=lambda path: Path(path).name)
def each_redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Every kind of server on this machine in turn: for what depends on the server itself, such as scripts."""
    server = RedisServer(request.param)
    yield server
    server.stop()


@pytest.fixture
def each_redis_url(each_redis_server: RedisServer) -> str:
    import redis

    with redis.Redis.from_url(each_redis_server.url) as client:
        client.flushall()
    return each_redis_server.url


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as its publisher quantized it, Q4_1."""
    from ops.demo import fetch_demo

    return Path(fetch_demo())


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_gguf: Path) -> Path:
    """The same weights as a float32 safetensors directory, written by transformers."""
    target = TEST_CACHE / "smollm2-hf"
    if target.exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**{**config, "architectures": ["LlamaForCausalLM"]}))
    model.load_state_dict(loaded.state_dict())  # what came from GGUF refuses to be saved; a plain copy does not
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    building = target.with_name(f"{target.name}.{os.getpid()}")
    model.save_pretrained(building)
    AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).save_pretrained(building)
    try:
        building.rename(target)
    except OSError:  # another run was first
        shutil.rmtree(building)
    return target


@pytest.fixture(scope="session")
def tiny_llama(smollm2_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama small enough to step in a millisecond, with SmolLM2's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in smollm2_hf.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "generation_config", "chat_template", "vocab", "merges")):
            shutil.copy(path, folder)
    return folder
