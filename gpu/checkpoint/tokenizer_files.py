"""The parts of a model's files that an API server needs: tokenizer, chat template, end tokens, sampling defaults. Torch-free."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpu.checkpoint.architecture import VOCABULARY
from gpu.checkpoint.fields import TEXT, Fields, Rule, integer, number, shown
from gpu.checkpoint.gguf_model import GGUFModel
from gpu.checkpoint.gguf_tokenizer import build_tokenizer
from gpu.checkpoint.gguf_vocabulary import Vocabulary
from gpu.checkpoint.model_files import find_model, read_json, read_text
from gpu.errors import CheckpointError

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_KINDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Defaults that a model may bring along, in the ranges that requests have. Others, and values out of range, do not count.
_SAMPLING: dict[str, Rule[Any]] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 1e6, above=True),
    "max_new_tokens": integer(1, 2**31 - 1),
}
_GGUF_SAMPLING = {  # GGUF's names of them
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_MOST_TOKENIZER_BYTES = 256 << 20
_PROBE = "a b\n\U000f0000"  # the last, of a private area, is in no vocabulary


def _is_token(value: Any) -> bool:
    return type(value) is str or (type(value) is dict and type(value.get("content")) is str)


def _are_templates(value: Any) -> bool:
    named = value if type(value) is list else []
    fit = all(type(entry) is dict and type(entry.get("name")) is type(entry.get("template")) is str for entry in named)
    return type(value) is str or (bool(named) and fit)


_TOKEN: Rule[str] = Rule(
    "text, or an object with the text as content", _is_token, lambda value: value if type(value) is str else value["content"]
)
_TEMPLATE: Rule[str | None] = Rule(  # of several the one named default, if any
    "text, or a list of objects with name and template",
    _are_templates,
    lambda value: value if type(value) is str else {entry["name"]: entry["template"] for entry in value}.get("default"),
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Fields as in engine.protocol.TokenizerBundle, which is made of this. All values are of their types and in range."""

    tokenizer_json: str  # of the `tokenizers` library; adds begin and end tokens as the model wants, never truncates or pads
    chat_template: str | None  # Jinja
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]  # the tokenizer's own first
    generation_config: dict[str, Any] = field(default_factory=dict)  # the model's sampling defaults, by their names in requests
    tokenizer_config: dict[str, str] = field(default_factory=dict)  # texts of special tokens, by SPECIAL_TOKENS


def load_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Those of a model directory or a GGUF file. A warning tells of a wrong value that has a default. Raises CheckpointError."""
    place = find_model(path)
    return _from_directory(place) if place.is_dir() else _from_gguf(place)


def _from_gguf(path: Path) -> TokenizerFiles:
    with GGUFModel(path) as file:
        vocabulary = Vocabulary.read(file)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is not None and len(vocabulary.tokens) > embedding.shape[0]:
            raise CheckpointError(
                f"{path} has {len(vocabulary.tokens):,} tokens (tokenizer.ggml.tokens), but embeddings of {embedding.shape[0]:,}"
            )
        lenient = replace(file.fields, lenient=True)
        named = {name: vocabulary.special_token(kind) for name, kind in _GGUF_KINDS.items()}
        return TokenizerFiles(
            tokenizer_json=build_tokenizer(vocabulary).to_str(),
            chat_template=vocabulary.chat_template,
            bos_token=named["bos_token"],
            eos_token=named["eos_token"],
            eos_token_ids=vocabulary.end_token_ids,
            generation_config=_sampling_defaults(lenient, _GGUF_SAMPLING),
            tokenizer_config={name: token for name, token in named.items() if token is not None},
        )


def _from_directory(folder: Path) -> TokenizerFiles:
    config, model, generation = (
        Fields(str(folder / name), read_json(folder / name), lenient=True)
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    vocab_size = model.get("vocab_size", VOCABULARY)
    tokenizer = _read_tokenizer(folder, vocab_size)
    tokens = _special_tokens(folder, config)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_chat_template(folder, config),
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        eos_token_ids=_end_token_ids(tokenizer, vocab_size, tokens.get("eos_token"), model, generation),
        generation_config=_sampling_defaults(generation, {name: name for name in _SAMPLING}),
        tokenizer_config=tokens,
    )


def _sampling_defaults(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    """`names`: the file's names of defaults, each with its name in requests."""
    found = {ours: fields.get(theirs, _SAMPLING[ours]) for theirs, ours in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _read_tokenizer(folder: Path, vocab_size: int | None) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()), None)
        hint = (
            f"; it has {other}: load it with transformers' AutoTokenizer and save_pretrained() writes the missing file"
            if other
            else ""
        )
        raise CheckpointError(f"{folder} has no tokenizer.json{hint}")
    text = read_text(path, _MOST_TOKENIZER_BYTES)
    tokenizer = _parse(path, text)
    if vocab_size is not None and _beyond(tokenizer, vocab_size):
        tokenizer = _parse(path, _without_added_tokens(path, text, vocab_size))
        if beyond := _beyond(tokenizer, vocab_size):
            raise CheckpointError(f"{path} has the token {shown(beyond)}, which is none of the model's {vocab_size:,} (vocab_size)")
    tokenizer.no_truncation()  # some files carry the settings of their training run
    tokenizer.no_padding()
    return tokenizer


def _parse(path: Path, text: str) -> Tokenizer:
    """The tokenizer, after it has encoded something: what it lacks shows only then."""
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode(_PROBE)
    except BaseException as error:  # the library raises bare Exceptions, and its panics are not even those
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    ids = tokenizer.get_vocab(with_added_tokens=False)
    if len(set(ids.values())) < len(ids):
        raise CheckpointError(f"{path} cannot be read: several tokens of its vocabulary have the same id")
    return tokenizer


def _beyond(tokenizer: Tokenizer, vocab_size: int) -> str | int | None:
    """A token that the model has no embedding for, if there is one: in the vocabulary, or added to every text."""
    token, token_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if token_id >= vocab_size:
        return token
    return next((token_id for token_id in tokenizer.encode("").ids if token_id >= vocab_size), None)


def _without_added_tokens(path: Path, text: str, vocab_size: int) -> str:
    """tokenizer.json without the added tokens that the model has no embedding for."""
    content = json.loads(text)
    kept = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    lost = [token["content"] for token in content["added_tokens"] if token["id"] >= vocab_size]
    logger.warning("%s adds %s, of which the model has no embeddings (vocab_size %d); ignored", path, shown(lost), vocab_size)
    return json.dumps({**content, "added_tokens": kept})


def _special_tokens(folder: Path, config: Fields) -> dict[str, str]:
    """The SPECIAL_TOKENS of tokenizer_config.json, and those that it lacks of special_tokens_map.json."""
    path = folder / "special_tokens_map.json"
    tokens: dict[str, str] = {}
    for fields in (config, Fields(str(path), read_json(path), lenient=True)):
        for name in SPECIAL_TOKENS:
            if name not in tokens and (token := fields.get(name, _TOKEN)) is not None:
                tokens[name] = token
    return tokens


def _chat_template(folder: Path, config: Fields) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json has: one template, or several by name of which `default` serves."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template", _TEMPLATE)
    if template is None:
        path = folder / "chat_template.json"
        template = Fields(str(path), read_json(path), lenient=True).get("chat_template", TEXT)
    return template


def _end_token_ids(
    tokenizer: Tokenizer, vocab_size: int | None, eos_token: str | None, model: Fields, generation: Fields
) -> list[int]:
    """The tokenizer's, and those of generation_config.json or, where it has none, of config.json; of tokens the model has."""
    size = vocab_size or max(tokenizer.get_vocab().values(), default=-1) + 1
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    named = _token_ids(generation, "eos_token_id", size) or _token_ids(model, "eos_token_id", size)
    return list(dict.fromkeys(named if own is None else [own, *named]))


def _token_ids(fields: Fields, name: str, vocab_size: int) -> list[int]:
    """Hugging Face's one id, list of ids or null. A warning tells of what is no token of the model."""
    value = fields.values.get(name)
    items = [] if value is None else value if isinstance(value, list) else [value]
    token = integer(0, vocab_size - 1)
    ids = [item for item in items if token.accepts(item)]
    if len(ids) < len(items):
        fields.wrong(name, f"token ids of the model, each {token.description}")
    return ids
