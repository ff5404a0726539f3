"""What an API server needs of a model's files: tokenizer, chat template, end tokens, sampling defaults. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpu.checkpoint.gguf import GGUFFile
from gpu.checkpoint.gguf_architecture import end_token_ids
from gpu.checkpoint.gguf_tokenizer import build_tokenizer, special_token
from gpu.checkpoint.model_files import find_model, read_json
from gpu.errors import CheckpointError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# GGUF's names of generation_config.json's sampling defaults
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}


@dataclass(frozen=True)
class TokenizerFiles:
    """Fields as in engine.protocol.TokenizerBundle, which is made of this."""

    tokenizer_json: str  # of the `tokenizers` library; adds begin and end tokens as the model wants, never truncates or pads
    chat_template: str | None  # Jinja
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]  # the tokenizer's own first
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)  # special tokens as plain strings


def load_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Of a model directory or a GGUF file. Raises CheckpointError."""
    place = find_model(path)
    return _from_directory(place) if place.is_dir() else _from_gguf(place)


def _from_gguf(path: Path) -> TokenizerFiles:
    with GGUFFile(path) as file:
        tokenizer = build_tokenizer(file)
        names = zip(_SPECIAL_TOKENS, ("bos", "eos", "unknown", "padding"), strict=True)
        tokens = {name: token for name, kind in names if (token := special_token(file, kind)) is not None}
        ends = end_token_ids(file)
        sampling = {ours: file.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
        return TokenizerFiles(
            tokenizer_json=tokenizer.to_str(),
            chat_template=file.metadata.get("tokenizer.chat_template"),
            bos_token=tokens.get("bos_token"),
            eos_token=tokens.get("eos_token"),
            eos_token_ids=ends,
            generation_config={"eos_token_id": ends, **{name: value for name, value in sampling.items() if value is not None}},
            tokenizer_config=dict(tokens),
        )


def _from_directory(folder: Path) -> TokenizerFiles:
    tokenizer = _read_tokenizer(folder)
    config = _tokenizer_config(folder)
    generation = read_json(folder / "generation_config.json")
    ends = _end_token_ids(folder, tokenizer, config.get("eos_token"), generation)
    template = _chat_template(folder, config.pop("chat_template", None))
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        bos_token=config.get("bos_token"),
        eos_token=config.get("eos_token"),
        eos_token_ids=ends,
        generation_config=generation,
        tokenizer_config=config,
    )


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()), None)
        hint = (
            f"; it has {other}: load it with transformers' AutoTokenizer and save_pretrained() writes the missing file"
            if other
            else ""
        )
        raise CheckpointError(f"{folder} has no tokenizer.json{hint}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()  # some files carry the settings of their training run
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, special tokens flattened to their text; those it lacks out of special_tokens_map.json."""
    config = read_json(folder / "tokenizer_config.json")
    config.pop("added_tokens_decoder", None)  # tokenizer.json has them, and they are long
    for name, token in read_json(folder / "special_tokens_map.json").items():
        config.setdefault(name, token)
    for name, token in config.items():
        if isinstance(token, dict) and "content" in token:
            config[name] = token["content"]
    return config


def _chat_template(folder: Path, configured: Any) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json has: one template, or several by name of which `default` serves."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    if configured is None:
        configured = read_json(folder / "chat_template.json").get("chat_template")
    return configured if isinstance(configured, str) else None


def _end_token_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None, generation: dict[str, Any]) -> list[int]:
    """The tokenizer's, and those of generation_config.json or, where it has none, of config.json; of tokens the model has."""
    model = read_json(folder / "config.json")
    named = generation.get("eos_token_id")
    if named is None:
        named = model.get("eos_token_id")
    candidates = [tokenizer.token_to_id(eos_token) if eos_token else None, *(named if isinstance(named, list) else [named])]
    size = model.get("vocab_size") or tokenizer.get_vocab_size()
    return list(dict.fromkeys(token for token in candidates if isinstance(token, int) and 0 <= token < size))
