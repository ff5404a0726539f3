"""What distinguishes one decoder of the Llama family from another: read from a Hugging Face `config.json`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu.errors import CheckpointError

# class name in config.json -> our name for the architecture
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn")
_MOST_LAYERS = 4096  # more is a damaged file, whose list of tensors would fill the memory


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
    rope_scaling: dict[str, Any] | None = None  # Hugging Face's keys; "rope_type" is always set; None: plain RoPE
    sliding_window: int | None = None  # tokens a query sees, itself included, in every layer; None: all
    tie_word_embeddings: bool = False  # lm_head.weight is model.embed_tokens.weight and absent from names()
    attention_bias: bool = False  # biases on q, k and v projections
    attention_output_bias: bool = False  # and on the output projection
    qk_norm: bool = False  # RMS norm of each head's q and k before RoPE
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise CheckpointError(f"the model's {name} must be a positive integer, not {getattr(self, name)!r}")
        if self.num_layers > _MOST_LAYERS:
            raise CheckpointError(f"the model's num_layers of {self.num_layers:,} cannot be right")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise CheckpointError(f"rotary embedding needs an even head_dim, not {self.head_dim}")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """`config` is a parsed config.json of transformers 4 or 5. Raises CheckpointError for what headrace cannot run."""
        try:
            return cls._from_hf_config(config)
        except (TypeError, ValueError, AttributeError) as error:  # a value of another type than the key has
            raise CheckpointError(f"config.json has a value that cannot be read: {error}") from None

    @classmethod
    def _from_hf_config(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        architecture = _architecture(config)
        _refuse_unsupported(config)
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        vocab_size = _required(config, "vocab_size")
        theta, scaling = _rope(config)
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or (128 if architecture == "qwen3" else hidden_size // num_heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            max_position_embeddings=_required(config, "max_position_embeddings"),
            rope_scaling=scaling,
            sliding_window=_sliding_window(config, architecture),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bias or architecture == "qwen2",
            attention_output_bias=bias and architecture != "qwen2",
            qk_norm=architecture == "qwen3",
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=tuple(token for token in token_id_list(config.get("eos_token_id")) if 0 <= token < vocab_size),
        )

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


def token_id_list(value: int | list[int] | None) -> list[int]:
    """Hugging Face's one id, list of ids or null, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and config.get("model_type") in ARCHITECTURES.values():
        return str(config["model_type"])
    found = ", ".join(names) or config.get("model_type") or "none named"
    raise CheckpointError(f"the model's architecture ({found}) is not supported; headrace runs {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises for variants of these architectures whose weights would load but compute something else."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"safetensors quantized by {method!r} are not supported; use unquantized weights or a GGUF file")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"the activation {config['hidden_act']!r} is not supported, only silu")
    if config.get("mlp_bias"):
        raise CheckpointError("biases in the MLP (mlp_bias) are not supported")
    rope = config.get("rope_parameters") or {}
    if (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError("partial rotary embedding (partial_rotary_factor) is not supported")


def _required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json has no usable {name!r}: {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base frequency and scaling, out of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type == "default":
        return theta, None
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"rotary embedding of type {rope_type!r} is not supported, only default, {', '.join(ROPE_TYPES)}")
    return theta, {"rope_type": rope_type, **parameters}


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    window = config.get("sliding_window")
    if not window or architecture == "llama":
        return None
    if architecture == "mistral":
        return int(window)
    # Qwen: off unless asked for, and then only from layer max_window_layers on
    first, layers = config.get("max_window_layers", 28), _required(config, "num_hidden_layers")
    if not config.get("use_sliding_window", False) or first >= layers:
        return None
    if first > 0:
        raise CheckpointError("models that mix sliding-window and full-attention layers are not supported yet")
    return int(window)
