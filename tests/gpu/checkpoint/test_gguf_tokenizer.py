"""Tokenizers out of GGUF files: the same ids as llama.cpp and as transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from gpu.checkpoint.gguf import GGUFFile
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.errors import CheckpointError
from tests.gpu.checkpoint.gguf_files import HIDDEN, VOCAB, hf_tensors, write_gguf
from tests.gpu.checkpoint.tokenizer_texts import LLAMA_CPP_IDS, TEXTS, tokenizer_of, transformers_tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_model_has_llama_cpps_tokens(text: str, smollm2_gguf: Path) -> None:
    tokenizer = _demo_tokenizer(smollm2_gguf)
    assert tokenizer.encode(text).ids == LLAMA_CPP_IDS[text]
    assert tokenizer.decode(LLAMA_CPP_IDS[text], skip_special_tokens=False) == text


_demo_tokenizer = cache(tokenizer_of)


def test_the_demo_model_has_transformers_tokens_but_for_blanks_before_digits(smollm2_gguf: Path) -> None:
    """transformers does not know the pre-tokenizer "smollm", by which digits stand alone and blanks before one stay together."""
    theirs, ours = transformers_tokenizer(smollm2_gguf), _demo_tokenizer(smollm2_gguf)
    different = {text for text in TEXTS if theirs.encode(text) != ours.encode(text).ids}
    assert different == {"a  1", "\n\n1. item\n2. item", "  12 cats", "3.14 10,000 ١٢ ½ ² ⅷ"}


def test_chat_template_and_special_tokens_of_the_demo_model(smollm2_gguf: Path) -> None:
    theirs, files = transformers_tokenizer(smollm2_gguf), load_tokenizer_files(smollm2_gguf)
    assert files.chat_template == theirs.chat_template
    assert (files.bos_token, files.eos_token) == (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert files.eos_token_ids == [2] and files.generation_config == {}
    conversation = [
        {"role": "user", "content": "Hi  2 🎉"},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": "\n"},
    ]
    rendered = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert files.chat_template is not None
    mine = environment.from_string(files.chat_template).render(
        messages=conversation, add_generation_prompt=True, **files.tokenizer_config
    )
    assert mine == rendered


def test_special_tokens_can_be_left_out(smollm2_gguf: Path) -> None:
    ids = [1, 4093, 198, 6004, 2]
    assert _demo_tokenizer(smollm2_gguf).decode(ids) == "user\nhi"


NUM_TOKENS = 3000  # of SmolLM2's vocabulary: enough for every rule, and transformers reads them in a second


@pytest.fixture(scope="session")
def some_of_smollm2(smollm2_gguf: Path) -> dict[str, Any]:
    """The metadata of a tokenizer of the first tokens and the merges among them."""
    with GGUFFile(smollm2_gguf) as file:
        metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    kept = metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"][:NUM_TOKENS]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][:NUM_TOKENS]
    known = set(kept)
    metadata["tokenizer.ggml.merges"] = [merge for merge in metadata["tokenizer.ggml.merges"] if merge.replace(" ", "") in known]
    return metadata


@pytest.fixture
def make_gguf(some_of_smollm2: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """A small model with these tokens and whatever else of its tokenizer is given (None: left out)."""

    def make(architecture: str = "llama", **fields: Any) -> Path:
        metadata = some_of_smollm2 | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
        given = {key: value for key, value in metadata.items() if value is not None}
        embedding = {"model.embed_tokens.weight": np.zeros((NUM_TOKENS, HIDDEN), np.float32)}
        return write_gguf(tmp_path / f"{architecture}.gguf", architecture, hf_tensors(architecture) | embedding, metadata=given)

    return make


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_pre_tokenizers_cut_as_transformers_does(name: str, make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(pre=name, add_bos_token=False)
    theirs, ours = transformers_tokenizer(path), tokenizer_of(path)
    for text in TEXTS:
        if name == "qwen2" and "\u0301" in text:
            continue  # the next test
        assert ours.encode(text).ids == theirs.encode(text), text


def test_qwen_composes_characters_as_its_own_tokenizer_does(make_gguf: Callable[..., Path]) -> None:
    """A GGUF file does not say so, and neither llama.cpp nor transformers restore it, but the models were trained on NFC text."""
    from transformers import Qwen2Tokenizer

    assert isinstance(Qwen2Tokenizer().backend_tokenizer.normalizer, normalizers.NFC)
    tokenizer = tokenizer_of(make_gguf(pre="qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids
    tokenizer = tokenizer_of(make_gguf(pre="gpt-2"))
    assert tokenizer.encode("e\u0301").ids != tokenizer.encode("é").ids


@pytest.mark.parametrize(
    ("fields", "before", "behind"),
    [
        ({"pre": "llama-bpe", "add_bos_token": None}, [1], []),  # Llama 3's adds it unless told otherwise
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "gpt-2", "add_bos_token": None}, [], []),
        ({"pre": "gpt-2", "add_bos_token": True}, [1], []),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"pre": "gpt-2", "add_bos_token": True, "bos_token_id": None}, [], []),
        ({"pre": "gpt-2", "add_bos_token": True, "bos_token_id": NUM_TOKENS}, [], []),
    ],
)
def test_begin_and_end_of_sequence_are_added_as_the_file_says(
    fields: dict[str, Any], before: list[int], behind: list[int], make_gguf: Callable[..., Path]
) -> None:
    files = load_tokenizer_files(make_gguf(**fields))
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    plain, other = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("Hello", "you"))
    assert tokenizer.encode("Hello").ids == [*before, *plain, *behind]
    assert tokenizer.encode("Hello", "you").ids == [*before, *plain, *behind, *before, *other, *behind]


def test_user_defined_tokens_stay_whole_and_are_text(make_gguf: Callable[..., Path], some_of_smollm2: dict[str, Any]) -> None:
    types = list(some_of_smollm2["tokenizer.ggml.token_type"])
    types[4] = 4  # <reponame>, say, is a tag that models write
    tokenizer = tokenizer_of(make_gguf(token_type=types))
    assert tokenizer.encode("x<reponame>y").ids == [104, 4, 105]
    assert tokenizer.decode([104, 4, 105, 2]) == "x<reponame>y"


@pytest.mark.parametrize("types", ["end", "none", "short", "wrong"])
def test_control_tokens_that_the_file_calls_text_are_one_token_all_the_same(
    types: str, make_gguf: Callable[..., Path], some_of_smollm2: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp does so with `<|im_end|>`. It cuts a `<|im_start|>` without a type, which no model has seen in pieces."""
    right = some_of_smollm2["tokenizer.ggml.token_type"]
    given = {"end": [*right[:2], 1, *right[3:]], "none": None, "short": right[:-1], "wrong": [1.0] * len(right)}[types]
    expected = tokenizer_of(make_gguf()).encode("<|im_start|>user\nhi<|im_end|>\n<|endoftext|>").ids
    assert not caplog.messages and (expected[0], expected[-3], expected[-1]) == (1, 2, 0)
    tokenizer = tokenizer_of(make_gguf(token_type=given))
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|endoftext|>").ids == expected
    assert tokenizer.decode(expected) == "user\nhi\n"
    assert "tokenizer.ggml.token_type calls " in caplog.text and "<|im_end|>" in caplog.text
    assert tokenizer.encode("<gh_stars>").ids != tokenizer_of(make_gguf()).encode("<gh_stars>").ids or types == "end"


def test_text_that_only_looks_like_a_control_token_stays_text(make_gguf: Callable[..., Path]) -> None:
    """No merge makes the token, but neither does the file name it nor the template write it: llama.cpp cuts it too."""
    tokenizer = tokenizer_of(make_gguf(token_type=None))
    assert len(tokenizer.encode("<repo_name>").ids) > 1


@pytest.mark.parametrize("merges", [["a zzz"], ["azzz"], ["th ere", ""], ["zz zz", "a"]])
def test_merges_of_what_is_no_token_are_ignored_with_a_warning(
    merges: list[str], make_gguf: Callable[..., Path], some_of_smollm2: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    right = some_of_smollm2["tokenizer.ggml.merges"]
    whole, more = (tokenizer_of(make_gguf(merges=merges)) for merges in (right, [*merges, *right]))
    for text in TEXTS:
        assert more.encode(text).ids == whole.encode(text).ids
    (warning,) = caplog.messages
    assert (
        f"tokenizer.ggml.merges has {len(merges)} merges of or to what is no token" in warning and json.dumps(merges[0]) in warning
    )


def test_special_ids_of_no_token_are_ignored_with_a_warning(
    make_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    files = load_tokenizer_files(make_gguf(bos_token_id=NUM_TOKENS, eos_token_id=1 << 31, unknown_token_id="x", add_bos_token=3))
    assert (files.bos_token, files.eos_token) == (None, None)
    for field in ("bos_token_id is 3000", "eos_token_id is", 'unknown_token_id is "x"', "add_bos_token is 3"):
        assert f"tokenizer.ggml.{field}" in caplog.text


def test_end_tokens_are_read_from_metadata_and_chat_template(make_gguf: Callable[..., Path]) -> None:
    files = load_tokenizer_files(make_gguf(eos_token_id=0, eot_token_id=5, eom_token_id=NUM_TOKENS))
    assert files.eos_token == "<|endoftext|>"
    assert files.eos_token_ids == [0, 5, 2]  # and <|im_end|>, which the template writes


def test_sampling_defaults_are_read(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
    path = write_gguf(tmp_path / "sampling.gguf", metadata={**tokens, "general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    assert load_tokenizer_files(path).generation_config == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "has no tokenizer"),
        ({"tokens": None}, "has no tokenizer"),
        ({"model": "t5"}, "has a tokenizer of kind 't5'; supported are"),
        ({"pre": "martian"}, "the pre-tokenizer 'martian', which is not known here; known are default, gpt-2"),
        ({"merges": None}, "has no tokenizer merges"),
        ({"model": "llama", "merges": None}, "neither tokenizer merges nor a score for each token"),
        ({"model": "llama", "merges": None, "scores": [0.0]}, "neither tokenizer merges nor a score for each token"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is .*, but must be a list, each item text"),
        ({"merges": [1.0]}, "tokenizer.ggml.merges is .*, but must be a list, each item text"),
        ({"pre": 3}, "tokenizer.ggml.pre is 3, but must be text"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt_are_refused(
    fields: dict[str, Any], message: str, make_gguf: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer_files(make_gguf(**fields))


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama file with a SentencePiece-like vocabulary: scores, byte tokens, blanks as U+2581, no merges."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    english = " ".join(topics.values())[:40_000]  # Python's own documentation
    text = [english, "Hello world, hello there. The the 日本語のテキスト été naïve " * 20]
    learner.train_from_iterator(text, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    learned = sorted(learner.get_vocab().items(), key=lambda item: (len(item[0]) == 1, item[1]))  # characters last: lowest scores
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in learned)]
    folder = tmp_path_factory.mktemp("sentence-piece")
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(learned))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(learned),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tensors = hf_tensors("llama")
    tensors["model.embed_tokens.weight"] = np.zeros((len(tokens), HIDDEN), np.float32)
    assert len(tokens) > VOCAB
    return write_gguf(folder / "model.gguf", tensors=tensors, metadata=metadata)


# text -> its tokens in the small vocabulary below according to llama.cpp (`llama-tokenize --ids`, build 11434), which puts a blank
# before the text and behind each special token, unless the file says otherwise
WITH_PREFIX = {
    "hello 12": [1, 263, 265],
    " 12": [1, 273, 265],
    "  hello": [1, 266, 263],
    "<turn>user hello</s>12": [1, 272, 271, 263, 2, 265],
    "<turn> user": [1, 272, 266, 270],
    "<s>hello": [1, 1, 263],
    "hellohello  12 x": [1, 263, 276, 260, 261, 273, 265, 273, 123],
    "": [1],
    "user\n\nuser": [1, 271, 13, 13, 270],
}
WITHOUT_PREFIX = {
    "hello 12": [1, 276, 260, 261, 265],
    " 12": [1, 265],
    "  hello": [1, 273, 263],
    "<turn>user hello</s>12": [1, 272, 270, 263, 2, 264],
    "<turn> user": [1, 272, 271],
    "<s>hello": [1, 1, 276, 260, 261],
    "hellohello  12 x": [1, 276, 260, 261, 276, 260, 261, 273, 265, 273, 123],
    "user\n\nuser": [1, 270, 13, 13, 270],
}


@pytest.mark.parametrize(("add_space_prefix", "golden"), [(True, WITH_PREFIX), (False, WITHOUT_PREFIX)])
def test_sentence_piece_has_llama_cpps_tokens(add_space_prefix: bool, golden: dict[str, list[int]], tmp_path: Path) -> None:
    pieces = [
        "▁h",
        "el",
        "lo",
        "▁hel",
        "▁hello",
        "12",
        "▁12",
        "▁▁",
        "us",
        "er",
        "▁us",
        "user",
        "▁user",
        "<turn>",
        "▁",
        *"12helorsu",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [3 if piece == "<turn>" else 1 for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }
    embedding = {"model.embed_tokens.weight": np.zeros((len(tokens), HIDDEN), np.float32)}
    tokenizer = tokenizer_of(write_gguf(tmp_path / "model.gguf", tensors=hf_tensors("llama") | embedding, metadata=metadata))
    for text, ids in golden.items():
        assert tokenizer.encode(text).ids == ids, text


def test_sentence_piece_has_transformers_tokens(sentence_piece: Path) -> None:
    """Except behind a blank, where transformers leaves out the one that SentencePiece puts first."""
    theirs, ours = transformers_tokenizer(sentence_piece), tokenizer_of(sentence_piece)
    for text in (text for text in TEXTS if not text.startswith(" ")):
        assert ours.encode(text).ids == theirs.encode(text), text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text), skip_special_tokens=True), text


def test_sentence_piece_falls_back_to_bytes_and_adds_bos(sentence_piece: Path) -> None:
    files = load_tokenizer_files(sentence_piece)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    assert tokenizer.encode("").ids == [1]
    unseen = chr(0x1F9FF)
    encoded = tokenizer.encode(unseen, add_special_tokens=False)
    assert encoded.tokens[-4:] == ["<0xF0>", "<0x9F>", "<0xA7>", "<0xBF>"]
    assert tokenizer.decode(encoded.ids) == unseen


def test_impossible_sampling_defaults_are_ignored_with_a_warning(
    make_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_gguf(eos_token_id=2)
    metadata = {"general.sampling.temp": 5.0, "general.sampling.top_k": 20.0, "general.sampling.min_p": 0.5}
    with GGUFFile(path) as file:
        metadata |= file.metadata
    write_gguf(path, metadata=metadata, tensors=hf_tensors("llama") | {"model.embed_tokens.weight": np.zeros((NUM_TOKENS, HIDDEN))})
    assert load_tokenizer_files(path).generation_config == {"min_p": 0.5}
    assert "general.sampling.temp is 5.0, but must be a number from 0 to 2" in caplog.text
    assert "general.sampling.top_k is 20.0, but must be an integer" in caplog.text


def test_more_tokens_than_embeddings_are_refused(make_gguf: Callable[..., Path], some_of_smollm2: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"has 3,001 tokens \(tokenizer\.ggml\.tokens\), but embeddings of 3,000"):
        load_tokenizer_files(make_gguf(tokens=[*some_of_smollm2["tokenizer.ggml.tokens"], "one more"]))
