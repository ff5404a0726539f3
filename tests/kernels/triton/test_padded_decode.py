"""Padded decodes of a whole model through the Triton kernels: what pads writes nothing and changes no bit of the others."""

import pytest
import torch

from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import DummyCheckpoint
from gpu.distributed import TensorParallelGroup
from gpu.models.attention import AttentionMetadata
from gpu.models.kv_cache import KVCache
from gpu.models.load import load_model
from gpu.numerics import Numerics
from gpu.runner.cuda_graphs import PaddedDecode
from gpu.runner.input_batch import Step
from kernels import device as kernel_device
from kernels.triton import attention

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128,
)  # fmt: skip


def make_step(contexts, device):
    """A decode of a request for each context, which has three blocks of its own."""

    def send(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    count = len(contexts)
    tables = [[1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(count)]
    positions = [length - 1 for length in contexts]
    slots = [tables[i][p // 16] * 16 + p % 16 for i, p in enumerate(positions)]
    starts = torch.arange(count + 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        send(tables, torch.int32), send(range(count), torch.int32), starts.to(device), send(contexts, torch.int32),
        send(slots, torch.int64),
    )  # fmt: skip
    rows = starts[:-1].numpy()
    ids = torch.arange(5, 5 + count, device=device)
    return Step(rows, rows * 0 + 1, starts.numpy(), ids, send(positions, torch.int64), metadata, rows.astype("int64"))


@pytest.mark.parametrize("split_below", [0, 256])
@torch.inference_mode()
def test_padding_disturbs_nobody(device, monkeypatch, split_below):
    monkeypatch.setattr(kernel_device, "on_accelerator", lambda x: True)
    monkeypatch.setattr(attention, "SPLIT_BELOW", split_below)
    monkeypatch.setattr(attention, "SEGMENT", 32)
    config = ArchitectureConfig.from_hf_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES})
    model = load_model(DummyCheckpoint(config), Numerics(torch.float32, torch.float32), device, TensorParallelGroup())
    model.rotary.ensure(128)
    kv = KVCache(2, 10, 16, 2, 16, torch.float32, device)
    for layer in kv.layers:
        for cache in layer:
            cache.normal_()
    decode = PaddedDecode(model, kv, [4], 8, torch.float32, device)
    for contexts in ([40, 3, 33], [17]):
        step = make_step(contexts, device)
        before = [torch.stack((keys.transpose(2, 3), values)) for keys, values in kv.layers]
        hidden, logits = (x.clone() for x in decode(step, decode.shape_of(step)))
        for old, (keys, values) in zip(before, kv.layers, strict=True):
            changed = (torch.stack((keys.transpose(2, 3), values)) != old).any(-1).any(2).any(0)  # [num_blocks, block_size]
            assert sorted(changed.flatten().nonzero()[:, 0].tolist()) == sorted(step.attention.slots.tolist())
        expected = model.forward(step.token_ids, step.positions, kv, step.attention)
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, model.logits(expected), atol=1e-5, rtol=1e-5)
        assert torch.isfinite(decode.logits).all()
