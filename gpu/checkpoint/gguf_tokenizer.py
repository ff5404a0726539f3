"""The tokenizer that a GGUF file describes, rebuilt for the `tokenizers` library. Torch-free.

A GGUF file has vocabulary, merges or scores, token types and the name of a pre-tokenizer; it has neither the normalizer nor the
regular expressions, which are therefore kept here by that name, as the models' own tokenizer.json files spell them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from gpu.checkpoint.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Merges, Vocabulary
from gpu.errors import CheckpointError

logger = logging.getLogger(__name__)

# ends of a turn or a text, which llama.cpp takes for control tokens too, whatever type the file gives them
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|eom_id|> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT]".split(" ")
)
_CONTROL_LOOK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")

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


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Raises CheckpointError for a kind of tokenizer that is not known here."""
    if vocabulary.model == "gpt2":
        tokenizer, merges = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer, merges = _sentence_piece(vocabulary)
    else:
        raise CheckpointError(
            f"{vocabulary.source} has a tokenizer of kind {vocabulary.model!r}; supported are 'gpt2' (byte-level BPE) and 'llama'"
        )
    _add_special_tokens(tokenizer, vocabulary, merges)
    tokenizer.post_processor = _post_processor(vocabulary)
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, Merges]:
    name = vocabulary.pre
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise CheckpointError(
            f"{vocabulary.source} cuts text by the pre-tokenizer {name!r}, which is not known here; known are {known}"
        )
    if vocabulary.merges is None:
        raise CheckpointError(f"{vocabulary.source} has no tokenizer merges (tokenizer.ggml.merges)")
    tokenizer = _bpe(vocabulary, vocabulary.merges, ignore_merges=name in _IGNORE_MERGES)
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, vocabulary.merges


def _sentence_piece(vocabulary: Vocabulary) -> tuple[Tokenizer, Merges]:
    """SentencePiece's BPE: scores for merges, U+2581 for blanks, and byte tokens for what is not in the vocabulary."""
    merges = vocabulary.merges or _merges_from_scores(vocabulary)
    tokenizer = _bpe(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token=vocabulary.special_token("unknown"))
    # at the beginning and after each special token, as in these models' own tokenizer.json files and in llama.cpp
    prefix = [normalizers.Prepend("▁")] if vocabulary.adds_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(content=" ", left=1)] if vocabulary.adds_space_prefix else []
    tokenizer.decoder = decoders.Sequence([*steps, *strip])
    return tokenizer, merges


def _bpe(vocabulary: Vocabulary, merges: Merges, **options: Any) -> Tokenizer:
    return Tokenizer(BPE(vocab=vocabulary.token_ids, merges=merges, **options))


def _merges_from_scores(vocabulary: Vocabulary) -> Merges:
    """Every way to put a token together out of two others, best score first.

    SentencePiece joins the pair whose result has the highest score; a merge list in that order does the same.
    """
    if vocabulary.scores is None:
        raise CheckpointError(f"{vocabulary.source} has neither tokenizer merges nor a score for each token")
    rank = vocabulary.token_ids
    merges = []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        usable = [(left, right) for left, right in halves if left in rank and right in rank]
        usable.sort(key=lambda pair: (rank[pair[0]], rank[pair[1]]))
        merges += [(score, left, right) for left, right in usable]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, merges: Merges) -> None:
    """Tokens that are matched in the text before anything else. Control tokens are special: decoding can leave them out."""
    overlooked = _overlooked_control_tokens(vocabulary, merges)
    kinds = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    special = [token for token, kind in kinds if kind in (UNKNOWN, CONTROL) or token in overlooked]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = [token for token, kind in kinds if kind == USER_DEFINED and token not in overlooked]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _overlooked_control_tokens(vocabulary: Vocabulary, merges: Merges) -> set[str]:
    """Control tokens that the file takes for text, as converters have written them, or that it gives no type.

    These are the known ends of a turn, as in llama.cpp. So are tokens that the file names as special or its chat template writes,
    if no merge makes them: as text they would never be that token.
    """
    template, named = vocabulary.chat_template or "", {vocabulary.tokens[number] for number in vocabulary.ids.values()}
    kinds = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    normal = (token for token, kind in kinds if kind == NORMAL)
    marked = {token for token in normal if _CONTROL_LOOK.fullmatch(token) and (token in named or token in template)}
    if marked:
        marked -= {left + right for left, right in merges}
    found = marked | {token for token, kind in kinds if token in _ENDS and kind not in (UNKNOWN, CONTROL)}
    if found:
        names = ", ".join(sorted(found))
        logger.warning("%s: tokenizer.ggml.token_type calls %s text; taken for control tokens", vocabulary.source, names)
    return found


def _post_processor(vocabulary: Vocabulary) -> Any:
    """Puts the begin token before a text and the end token behind it, where the file asks for them."""
    asked = {"bos": vocabulary.adds_bos, "eos": vocabulary.adds_eos}
    added = {kind: (vocabulary.tokens[vocabulary.ids[kind]], vocabulary.ids[kind]) for kind, is_added in asked.items() if is_added}
    before, behind = ([added[kind][0]] if kind in added else [] for kind in ("bos", "eos"))
    single = [*before, "$A", *behind]
    pair = [f"{piece}:0" for piece in single] + [f"{piece}:1" for piece in [*before, "$B", *behind]]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(added.values()))
