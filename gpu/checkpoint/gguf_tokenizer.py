"""The tokenizer that a GGUF file describes, rebuilt for the `tokenizers` library. Torch-free.

A GGUF file has vocabulary, merges or scores, token types and the name of a pre-tokenizer; it has neither the normalizer nor the
regular expressions, which are therefore kept here by that name, as the models' own tokenizer.json files spell them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from gpu.checkpoint.gguf import GGUFFile
from gpu.errors import CheckpointError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(*patterns: str) -> Callable[[], Any]:
    """Cut at each pattern in turn, matches kept as pieces of their own; then bytes to the byte alphabet."""

    def make() -> Any:
        pieces = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    # files from before the name was recorded, too: GPT-2's is the most likely
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "phi-2", "jais", "gigachat"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _digits_then_gpt2),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "chatglm-bpe"), _split(_LLAMA3_SPLIT)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _split(_QWEN2_SPLIT)),
    "tekken": _split(_TEKKEN_SPLIT),
    "deepseek-coder": _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
_IGNORE_MERGES = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}  # a piece that is a token stays whole
_NFC = {"qwen2"}
_ADD_BOS = _IGNORE_MERGES  # where the file does not say


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises CheckpointError for a kind of tokenizer that is not known here."""
    metadata = file.metadata
    model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if model is None or not tokens:
        raise CheckpointError(f"{file.path} has no tokenizer (tokenizer.ggml.model and tokens)")
    if model == "gpt2":
        tokenizer = _byte_level(file)
    elif model == "llama":
        tokenizer = _sentence_piece(file)
    else:
        raise CheckpointError(
            f"the tokenizer of {file.path} is of kind {model!r}; supported are 'gpt2' (byte-level BPE) and 'llama'"
        )
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    tokenizer.post_processor = _post_processor(file)
    return tokenizer


def special_token(file: GGUFFile, kind: str) -> str | None:
    """The text of the `kind` token ("bos", "eos", "unknown", "padding", ...), if the file names one."""
    tokens, number = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return tokens[number] if number is not None and 0 <= number < len(tokens) else None


def adds_bos(file: GGUFFile) -> bool:
    default = file.metadata.get("tokenizer.ggml.model") == "llama" or file.metadata.get("tokenizer.ggml.pre") in _ADD_BOS
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", default)) and special_token(file, "bos") is not None


def _byte_level(file: GGUFFile) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre") or "default"
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise CheckpointError(f"{file.path} cuts text by the pre-tokenizer {name!r}, which is not known here; known are {known}")
    lines = file.metadata.get("tokenizer.ggml.merges")
    if lines is None:
        raise CheckpointError(f"{file.path} has no tokenizer merges (tokenizer.ggml.merges)")
    tokenizer = _bpe(file, [_merge(line) for line in lines], ignore_merges=name in _IGNORE_MERGES)
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GGUFFile) -> Tokenizer:
    """SentencePiece's BPE: scores for merges, U+2581 for blanks, and byte tokens for what is not in the vocabulary."""
    lines = file.metadata.get("tokenizer.ggml.merges")
    merges = [_merge(line) for line in lines] if lines else _merges_from_scores(file)
    tokenizer = _bpe(file, merges, fuse_unk=True, byte_fallback=True, unk_token=special_token(file, "unknown"))
    add_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if add_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if add_prefix else [])])
    return tokenizer


def _bpe(file: GGUFFile, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    for left, right in merges:  # the library panics on a merge that makes no token
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(
                f"the tokenizer of {file.path} is damaged: it merges {left!r} and {right!r}, which are not tokens"
            )
    return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _merges_from_scores(file: GGUFFile) -> list[tuple[str, str]]:
    """Every way to put a token together out of two others, best score first.

    SentencePiece joins the pair whose result has the highest score; a merge list in that order does the same.
    """
    tokens, scores = file.metadata["tokenizer.ggml.tokens"], file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{file.path} has neither tokenizer merges nor a score for each token")
    rank = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        usable = [(left, right) for left, right in halves if left in rank and right in rank]
        usable.sort(key=lambda pair: (rank[pair[0]], rank[pair[1]]))
        merges += [(score, left, right) for left, right in usable]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are matched in the text before anything else. Control tokens are special: decoding can leave them out."""
    kinds = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind in (_UNKNOWN, _CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token, kind in kinds if kind == _USER_DEFINED])


def _post_processor(file: GGUFFile) -> Any:
    """Puts the begin token before a text and the end token behind it, where the file asks for them."""
    added: dict[str, tuple[str, int]] = {}
    if adds_bos(file):
        added["bos"] = _special(file, "bos")
    if file.metadata.get("tokenizer.ggml.add_eos_token", False) and special_token(file, "eos") is not None:
        added["eos"] = _special(file, "eos")
    before, behind = ([added[kind][0]] if kind in added else [] for kind in ("bos", "eos"))
    single = [*before, "$A", *behind]
    pair = [f"{piece}:0" for piece in single] + [f"{piece}:1" for piece in [*before, "$B", *behind]]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(added.values()))


def _special(file: GGUFFile, kind: str) -> tuple[str, int]:
    number = file.metadata[f"tokenizer.ggml.{kind}_token_id"]
    return file.metadata["tokenizer.ggml.tokens"][number], number
