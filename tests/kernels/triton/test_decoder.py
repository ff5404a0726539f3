"""A whole model of random weights through the Triton kernels, as on a GPU, beside the same model through the CPU's."""

import numpy as np
import pytest
import torch

from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import DummyCheckpoint
from gpu.distributed import TensorParallelGroup
from gpu.models.attention import AttentionMetadata
from gpu.models.kv_cache import KVCache
from gpu.models.load import load_model
from gpu.numerics import Numerics
from kernels import device as kernel_device

BLOCK = 16
CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=64, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128,
)  # fmt: skip


@torch.inference_mode()
def compute(model, kv):
    """Logits of a prompt of 20 tokens, then of a decode of it beside a chunk of another."""
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, 64, 33))

    def step(token_ids, positions, slots, query_start, context_lens):
        tables = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
        columns = [torch.tensor(x, dtype=torch.int32) for x in (list(range(len(context_lens))), query_start, context_lens)]
        metadata = AttentionMetadata(tables, *columns, torch.tensor(slots))
        return model.logits(model.forward(token_ids, torch.tensor(positions), kv, metadata))

    first = step(tokens[:20], list(range(20)), [*range(48, 64), *range(16, 20)], [0, 20], [20])
    second = step(tokens[20:], [20, *range(12)], [20, *range(32, 44)], [0, 1, 13], [21, 12])
    return torch.cat((first, second))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_logits_are_those_of_the_cpu_kernels(monkeypatch, architecture):
    window = {"sliding_window": 9} if architecture == "MistralForCausalLM" else {}
    kind = architecture.removesuffix("ForCausalLM").lower()
    config = ArchitectureConfig.from_hf_config({"architectures": [architecture], "model_type": kind, **SIZES, **window})
    model = load_model(DummyCheckpoint(config), Numerics(torch.float32, torch.float32), CPU, TensorParallelGroup())
    model.rotary.ensure(128)
    kv = [KVCache(2, 5, BLOCK, 2, 16, torch.float32, CPU) for _ in range(2)]
    expected = compute(model, kv[0])
    asked = []
    monkeypatch.setattr(kernel_device, "on_accelerator", lambda x: asked.append(x) or True)
    logits = compute(model, kv[1])
    assert asked
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv[1].layers[1], kv[0].layers[1], atol=1e-5, rtol=1e-5)
