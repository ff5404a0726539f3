"""The decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

They differ in biases, norms of queries and keys, window and sizes, all of which `ArchitectureConfig` says and the checkpoint holds.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu.errors import CheckpointError
from gpu.models.attention import AttentionMetadata, PagedAttention
from gpu.models.kv_cache import KVCache
from gpu.models.layers import RMSNorm
from gpu.models.rotary import RotaryEmbedding
from gpu.models.shards import ShardReader
from kernels.silu_mul import silu_mul


class ComputeLayers(Protocol):
    """All layers, one after the other; `hidden` becomes the last one's output."""

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: KVCache,
        step: AttentionMetadata,
    ) -> None: ...


class CausalLM:
    def __init__(self, reader: ShardReader) -> None:
        config, group = reader.config, reader.group
        if config.num_kv_heads % group.size:
            raise CheckpointError(
                f"tensor parallel size {group.size} does not divide the model's {config.num_kv_heads} key-value heads"
            )
        for num_features in (config.num_heads * config.head_dim, config.intermediate_size):
            reader.check_row_parallel(num_features)
        self.config = config
        self.num_kv_heads = config.num_kv_heads // group.size  # of this rank
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling, reader.device)
        self.embedding, self.head = reader.embedding_and_head(
            "model.embed_tokens.weight", None if config.tie_word_embeddings else "lm_head.weight"
        )
        self.layers = [DecoderLayer(reader, index) for index in range(config.num_layers)]
        self.compiled: ComputeLayers | None = None  # computes what the layers do, to the same bits
        self.norm = RMSNorm(reader.vector("model.norm.weight"), config.rms_norm_eps)
        self.weight_bytes = reader.num_bytes

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, kv: KVCache, step: AttentionMetadata) -> torch.Tensor:
        """token_ids, positions [num_tokens] int64; returns the final hidden states, [num_tokens, hidden], and fills `kv`."""
        cos_sin = self.rotary.cos_sin
        residual = self.embedding(token_ids)
        hidden = torch.zeros_like(residual)
        if self.compiled is not None:
            self.compiled(hidden, residual, positions, cos_sin, kv, step)
        else:
            for layer, cache in zip(self.layers, kv.layers, strict=True):
                hidden = layer(hidden, residual, positions, cos_sin, cache, step)
        return self.norm.add(hidden, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden]; returns [rows, vocab_size] float32, gathered over ranks."""
        return self.head(hidden)


class DecoderLayer:
    def __init__(self, reader: ShardReader, index: int) -> None:
        prefix = f"model.layers.{index}."
        epsilon = reader.config.rms_norm_eps
        self.input_norm = RMSNorm(reader.vector(prefix + "input_layernorm.weight"), epsilon)
        self.attention = SelfAttention(reader, prefix + "self_attn.")
        self.post_attention_norm = RMSNorm(reader.vector(prefix + "post_attention_layernorm.weight"), epsilon)
        self.mlp = MLP(reader, prefix + "mlp.")

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        step: AttentionMetadata,
    ) -> torch.Tensor:
        """`hidden` is the layer before's output, not yet added to `residual`; so is what is returned."""
        hidden = self.attention(self.input_norm.add(hidden, residual), positions, cos_sin, cache, step)
        return self.mlp(self.post_attention_norm.add(hidden, residual))


class SelfAttention:
    def __init__(self, reader: ShardReader, prefix: str) -> None:
        config, size = reader.config, reader.group.size
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads // size, config.num_kv_heads // size
        self.qkv = reader.column_parallel(prefix + "q_proj", prefix + "k_proj", prefix + "v_proj")
        self.output = reader.row_parallel(prefix + "o_proj")
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(reader.vector(prefix + "q_norm.weight"), config.rms_norm_eps)
            self.key_norm = RMSNorm(reader.vector(prefix + "k_norm.weight"), config.rms_norm_eps)
        self.attend = PagedAttention(self.num_heads, self.num_kv_heads, self.head_dim, config.sliding_window or 0)

    def __call__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        step: AttentionMetadata,
    ) -> torch.Tensor:
        heads = self.qkv(hidden).view(hidden.shape[0], -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            query, key, _ = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            query.copy_(self.query_norm(query))
            key.copy_(self.key_norm(key))
        return self.output(self.attend(heads, positions, cos_sin, cache, step))


class MLP:
    def __init__(self, reader: ShardReader, prefix: str) -> None:
        self.gate_up = reader.column_parallel(prefix + "gate_proj", prefix + "up_proj")
        self.down = reader.row_parallel(prefix + "down_proj")
        self.intermediate_size = reader.config.intermediate_size // reader.group.size

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(hidden)))
