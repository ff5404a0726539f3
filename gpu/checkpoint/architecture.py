"""The differences between decoders of the Llama family, read from a Hugging Face `config.json`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu.checkpoint.fields import FLAG, OBJECT, TEXT, Fields, integer, list_of, number
from gpu.checkpoint.rope_scaling import POSITIONS, RopeScaling, read_rope
from gpu.errors import CheckpointError

# class name in config.json -> our name for the architecture
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Sizes that can be right. More would be a damaged file, whose list of tensors might fill the memory.
VOCABULARY = integer(1, 1 << 24)
WIDTH = integer(1, 1 << 24)
LAYERS = integer(1, 4096)
HEADS = integer(1, 1 << 16)
HEAD_DIM = integer(2, 1 << 16)
EPSILON = number(0, 1)
_WINDOW = integer(0, 2**31 - 1)  # 0: none
_WINDOW_LAYERS = integer(0, 1 << 16)


@dataclass(frozen=True)
class ArchitectureConfig:
    """Sizes and variants of one decoder. All counts are of the whole model, before tensor parallelism."""

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None  # None: plain RoPE
    sliding_window: int | None = None  # tokens a query sees, itself included, in every layer; None: all
    tie_word_embeddings: bool = False  # lm_head.weight is model.embed_tokens.weight and absent from names()
    attention_bias: bool = False  # biases on q, k and v projections
    attention_output_bias: bool = False  # and on the output projection
    qk_norm: bool = False  # RMS norm of each head's q and k before RoPE

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str = "config.json") -> ArchitectureConfig:
        """`config` is a parsed config.json of transformers 4 or 5, which messages call `source`.

        Raises CheckpointError for what headrace cannot run, and for a value of the wrong type or out of range: no default replaces
        what the file says, since the model would compute something else.
        """
        fields = Fields(source, config)
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        num_heads, hidden_size = fields.need("num_attention_heads", HEADS), fields.need("hidden_size", WIDTH)
        max_positions = fields.need("max_position_embeddings", POSITIONS)
        theta, scaling = read_rope(fields, max_positions)
        bias = fields.get("attention_bias", FLAG) or False
        epsilon = fields.get("rms_norm_eps", EPSILON)
        return cls(
            architecture=architecture,
            vocab_size=fields.need("vocab_size", VOCABULARY),
            hidden_size=hidden_size,
            intermediate_size=fields.need("intermediate_size", WIDTH),
            num_layers=fields.need("num_hidden_layers", LAYERS),
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads", HEADS) or num_heads,
            head_dim=fields.get("head_dim", HEAD_DIM) or (128 if architecture == "qwen3" else hidden_size // num_heads),
            rms_norm_eps=1e-6 if epsilon is None else epsilon,
            rope_theta=theta,
            max_position_embeddings=max_positions,
            rope_scaling=scaling,
            sliding_window=_sliding_window(fields, architecture),
            tie_word_embeddings=fields.get("tie_word_embeddings", FLAG) or False,
            attention_bias=bias or architecture == "qwen2",
            attention_output_bias=bias and architecture != "qwen2",
            qk_norm=architecture == "qwen3",
        ).checked(source)

    def checked(self, source: str) -> ArchitectureConfig:
        """Itself. Raises CheckpointError for sizes that do not go together; messages call the model's file `source`."""
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{source}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise CheckpointError(f"{source}: rotary embedding needs an even head_dim, not {self.head_dim}")
        return self

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by its Hugging Face name; linear weights are [out_features, in_features]."""
        hidden, middle = self.hidden_size, self.intermediate_size
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key_value, hidden),
            "self_attn.v_proj.weight": (key_value, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (middle, hidden),
            "mlp.up_proj.weight": (middle, hidden),
            "mlp.down_proj.weight": (hidden, middle),
        }
        if self.attention_bias:
            layer |= {
                "self_attn.q_proj.bias": (query,),
                "self_attn.k_proj.bias": (key_value,),
                "self_attn.v_proj.bias": (key_value,),
            }
        if self.attention_output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def _architecture(config: Fields) -> str:
    names, kind = config.get("architectures", list_of(TEXT)) or [], config.get("model_type", TEXT)
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and kind in ARCHITECTURES.values():
        return str(kind)
    found, known = ", ".join(names) or kind or "none named", ", ".join(ARCHITECTURES)
    raise CheckpointError(f"{config.source}: the model's architecture ({found}) is not supported; headrace runs {known}")


def _refuse_unsupported(config: Fields) -> None:
    """Raises for variants of these architectures whose weights would load but compute something else."""
    if config.get("quantization_config", OBJECT):
        method = config.inside("quantization_config").get("quant_method", TEXT) or "unknown"
        raise CheckpointError(
            f"{config.source}: safetensors quantized by {method!r} are not supported; use unquantized weights or a GGUF file"
        )
    activation = config.get("hidden_act", TEXT)
    if activation not in (None, "silu", "swish"):
        raise CheckpointError(f"{config.source}: the activation {activation!r} is not supported, only silu")
    if config.get("mlp_bias", FLAG):
        raise CheckpointError(f"{config.source}: biases in the MLP (mlp_bias) are not supported")


def _sliding_window(config: Fields, architecture: str) -> int | None:
    window = config.get("sliding_window", _WINDOW)
    if not window or architecture == "llama":
        return None
    if architecture == "mistral":
        return window
    # Qwen: off unless asked for, and then only from layer max_window_layers on
    first = config.get("max_window_layers", _WINDOW_LAYERS)
    first, layers = 28 if first is None else first, config.need("num_hidden_layers", LAYERS)
    if not config.get("use_sliding_window", FLAG) or first >= layers:
        return None
    if first > 0:
        raise CheckpointError(f"{config.source}: models that mix sliding-window and full-attention layers are not supported yet")
    return window
