"""Tokenizers out of GGUF files and directories: the same ids as llama.cpp and as transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from gpu.checkpoint.gguf import GGUFFile
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.errors import CheckpointError
from tests.gpu.checkpoint.gguf_files import HIDDEN, VOCAB, hf_tensors, write_gguf

# text -> its tokens in SmolLM2's file according to llama.cpp (`llama-tokenize --ids`, build 11434)
LLAMA_CPP_IDS: dict[str, list[int]] = {
    "Hello, world!": [19556, 28, 905, 17],
    "a  1": [81, 256, 33],
    "\n\n1. item\n2. item": [1116, 33, 30, 5033, 198, 34, 30, 5033],
    "  12 cats": [256, 33, 34, 7680],
    "🎉👨\u200d👩 🇩🇪": [10813, 232, 227, 10813, 235, 118, 321, 231, 10813, 235, 119, 15107, 225, 119, 10813, 225, 120],
    "日本語のテキスト、中文。": [
        23274,
        115,
        40993,
        179,
        120,
        248,
        26453,
        11100,
        224,
        10391,
        251,
        10391,
        134,
        11100,
        226,
        29917,
        28589,
        29184,
        19076,
    ],
    "한국어 مرحبا हिन्दी ไทย": [
        33085,
        246,
        181,
        130,
        251,
        183,
        240,
        129,
        36395,
        20602,
        44626,
        31462,
        10805,
        12335,
        134,
        27011,
        30658,
        16525,
        44757,
        37189,
        216,
        31933,
        222,
        10283,
        241,
        10283,
        112,
    ],
    "e\u0301 n\u0303 A\u030a ﬁ": [85, 151, 219, 304, 151, 221, 330, 151, 228, 40367],
    "tabs\t\t\tand   spaces    \n   \n\n x": [100, 7366, 1656, 197, 397, 256, 5600, 47213, 1116, 1792],
    "3.14 10,000 ١٢ ½ ² ⅷ": [
        35,
        30,
        33,
        36,
        216,
        33,
        32,
        28,
        32,
        32,
        32,
        216,
        164,
        111,
        164,
        112,
        216,
        16738,
        216,
        19133,
        216,
        173,
        223,
        132,
    ],
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|>": [1, 4093, 198, 6004, 2, 198, 0, 216, 1],
    "don't I'LL we've 'S": [12420, 982, 339, 23, 16421, 392, 3543, 637, 67],
    "\r\n\r\nwin": [7209, 198, 5544],
    "\u00a0nbsp\u2003em\u200bzw": [15442, 94, 32093, 321, 221, 391, 321, 229, 106, 103],
    "def f(x):\n    return x**2  # ok": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 10907],
    "null\x00byte": [18220, 190, 26846],
    "trailing   ": [4861, 4966, 333],
    "ÄÖÜ ß ẞ": [142, 222, 142, 240, 142, 246, 5549, 249, 15822, 135, 248],
    "<repo_name>x<file_sep>": [3, 104, 5],
    "“quotes” — dashes…": [1585, 385, 2346, 573, 1841, 287, 9604, 2829],
    "$100 €20 5% C++ #1 @me a_b": [20, 33, 32, 32, 24927, 34, 32, 216, 37, 21, 340, 11444, 907, 33, 3394, 1558, 253, 79, 82],
    "a" * 9 + " " * 40 + "b": [46880, 46880, 81, 12427, 415, 278],
    "": [],
}
TEXTS = list(LLAMA_CPP_IDS)


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_str(load_tokenizer_files(path).tokenizer_json)


@cache
def transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return (
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name) if path.is_file() else AutoTokenizer.from_pretrained(path)
    )


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


def test_a_directory_has_transformers_tokens(smollm2_hf: Path) -> None:
    theirs, files = transformers_tokenizer(smollm2_hf), load_tokenizer_files(smollm2_hf)
    ours = Tokenizer.from_str(files.tokenizer_json)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text), text
    assert files.chat_template == theirs.chat_template
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<|im_start|>", "<|im_end|>", [2])


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
def test_begin_and_end_of_sequence(
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


def test_end_tokens(make_gguf: Callable[..., Path]) -> None:
    files = load_tokenizer_files(make_gguf(eos_token_id=0, eot_token_id=5, eom_token_id=NUM_TOKENS))
    assert files.eos_token == "<|endoftext|>"
    assert files.eos_token_ids == [0, 5, 2]  # and <|im_end|>, which the template writes


def test_sampling_defaults(tmp_path: Path) -> None:
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
    text = [Path(__file__).read_text("utf-8"), "Hello world, hello there. The the 日本語のテキスト été naïve " * 20]
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


# --- directories ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a three-word tokenizer."""
    tokenizer = Tokenizer(
        models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2, "<s>": 3, "</s>": 4, "<eot>": 5}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<eot>")])
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def test_a_directory_with_only_a_tokenizer(folder: Path) -> None:
    files = load_tokenizer_files(folder)
    assert (files.chat_template, files.bos_token, files.eos_token, files.eos_token_ids, files.generation_config) == (
        None,
        None,
        None,
        [],
        {},
    )
    assert Tokenizer.from_str(files.tokenizer_json).encode("hello world").ids == [0, 1]  # neither cut nor padded


def test_special_tokens_by_name(folder: Path) -> None:
    configure(
        folder, bos_token={"content": "<s>", "lstrip": False}, added_tokens_decoder={"3": {"content": "<s>"}}, model_max_length=9
    )
    configure(folder, "special_tokens_map.json", bos_token="[UNK]", eos_token={"content": "</s>"})
    configure(folder, "generation_config.json", eos_token_id=[5, 4], temperature=0.6)
    configure(folder, "config.json", eos_token_id=0)
    files = load_tokenizer_files(folder)
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<s>", "</s>", [4, 5])
    assert files.tokenizer_config == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.generation_config == {"temperature": 0.6}


def test_the_models_configuration_names_the_end_where_nothing_else_does(folder: Path) -> None:
    configure(folder, "config.json", eos_token_id=4)
    assert load_tokenizer_files(folder).eos_token_ids == [4]


def test_end_tokens_that_the_model_lacks_are_left_out(folder: Path) -> None:
    configure(folder, "config.json", eos_token_id=[4, 7, -1], vocab_size=6)
    assert load_tokenizer_files(folder).eos_token_ids == [4]


def test_tokenizer_json_decides_which_special_tokens_are_added(folder: Path) -> None:
    configure(folder, bos_token="<s>", eos_token="</s>", add_bos_token=True, tokenizer_class="PreTrainedTokenizerFast")
    assert Tokenizer.from_str(load_tokenizer_files(folder).tokenizer_json).encode("hello").ids == [0]
    assert transformers_tokenizer(folder).encode("hello", truncation=False, padding=False) == [0]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = load_tokenizer_files(folder)
    assert Tokenizer.from_str(files.tokenizer_json).encode("hello").ids == [3, 0]


def test_where_the_chat_template_comes_from(folder: Path) -> None:
    configure(folder, "chat_template.json", chat_template="processor")
    assert load_tokenizer_files(folder).chat_template == "processor"
    configure(folder, chat_template=[{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "several"}])
    assert load_tokenizer_files(folder).chat_template == "several"
    configure(folder, chat_template="one")
    files = load_tokenizer_files(folder)
    assert files.chat_template == "one"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer_files(folder).chat_template == "file"


def test_a_broken_directory_is_refused_with_its_reason(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model at"):
        load_tokenizer_files(folder / "nowhere")
    configure(folder, "generation_config.json")
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not a JSON object"):
        load_tokenizer_files(folder)
    configure(folder, "generation_config.json")
    (folder / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer_files(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer_files(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; it has tokenizer\.model: load it with transformers"):
        load_tokenizer_files(folder)


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("model", "vocab", {"a": 0, "b": 0, "[UNK]": 1}, "several tokens of its vocabulary have the same id"),
        ("model", "unk_token", "gone", "Missing"),
        ("model", "type", "Magic", "untagged enum"),
        ("post_processor", "special_tokens", {}, "no entry found"),
    ],
)
def test_a_tokenizer_that_would_fail_at_the_first_text_is_refused(
    part: str, field: str, value: Any, message: str, folder: Path
) -> None:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 3)])
    content = json.loads(tokenizer.to_str())
    content[part][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json cannot be read: .*{message}"):
        load_tokenizer_files(folder)


DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1, "max_new_tokens": 100}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 5.0),
        ("temperature", "0.7"),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 50.0),
        ("top_k", -2),
        ("top_k", 1 << 40),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("max_new_tokens", 0),
        ("max_new_tokens", "20"),
    ],
)
def test_an_impossible_sampling_default_is_ignored_with_a_warning(
    name: str, value: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(folder, "generation_config.json", **{**DEFAULTS, name: value}, do_sample=True, transformers_version="5.0")
    assert load_tokenizer_files(folder).generation_config == {key: right for key, right in DEFAULTS.items() if key != name}
    (warning,) = caplog.messages
    assert f"generation_config.json: {name} is {json.dumps(value)}, but must be" in warning


def test_right_sampling_defaults_are_taken_as_they_are(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, "generation_config.json", **DEFAULTS, eos_token_id=4, do_sample=None)
    assert load_tokenizer_files(folder).generation_config == DEFAULTS
    assert not caplog.messages


def test_gguf_sampling_defaults_are_checked_too(make_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    path = make_gguf(eos_token_id=2)
    metadata = {"general.sampling.temp": 5.0, "general.sampling.top_k": 20.0, "general.sampling.min_p": 0.5}
    with GGUFFile(path) as file:
        metadata |= file.metadata
    write_gguf(path, metadata=metadata, tensors=hf_tensors("llama") | {"model.embed_tokens.weight": np.zeros((NUM_TOKENS, HIDDEN))})
    assert load_tokenizer_files(path).generation_config == {"min_p": 0.5}
    assert "general.sampling.temp is 5.0, but must be a number from 0 to 2" in caplog.text
    assert "general.sampling.top_k is 20.0, but must be an integer" in caplog.text


@pytest.mark.parametrize(
    ("generation", "model", "ends", "warned"),
    [
        ([2, None], None, [4, 2], ["generation_config.json: eos_token_id is [2, null]"]),
        (2.0, 5, [4, 5], ["generation_config.json: eos_token_id is 2.0"]),
        (True, None, [4], ["generation_config.json: eos_token_id is true"]),
        (
            "</s>",
            [True, 5, "x"],
            [4, 5],
            ["generation_config.json: eos_token_id is", 'config.json: eos_token_id is [true, 5, "x"]'],
        ),
        ([], 5, [4, 5], []),
        ([[5]], None, [4], ["generation_config.json: eos_token_id is [[5]]"]),
        (6, None, [4], ["generation_config.json: eos_token_id is 6"]),
    ],
)
def test_impossible_end_tokens_are_ignored_with_a_warning(
    generation: Any, model: Any, ends: list[int], warned: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(folder, eos_token="</s>")
    configure(folder, "generation_config.json", eos_token_id=generation)
    configure(folder, "config.json", eos_token_id=model, vocab_size=6)
    assert load_tokenizer_files(folder).eos_token_ids == ends
    assert len(caplog.messages) == len(warned)
    for start, message in zip(warned, caplog.messages, strict=True):
        assert start in message and "token ids of the model, each an integer from 0 to 5" in message


def test_special_tokens_that_are_no_text_are_ignored_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, bos_token=3, eos_token={"content": 4}, pad_token="[UNK]", add_bos_token=True, chat_template=["x"])
    configure(folder, "special_tokens_map.json", bos_token="<s>")
    files = load_tokenizer_files(folder)
    assert files.tokenizer_config == {"pad_token": "[UNK]", "bos_token": "<s>"}
    assert (files.bos_token, files.eos_token, files.chat_template) == ("<s>", None, None)
    for name in ("bos_token is 3", 'eos_token is {"content": 4}', 'chat_template is ["x"]'):
        assert f"tokenizer_config.json: {name}, but must be" in caplog.text


def test_added_tokens_beyond_the_models_vocabulary_are_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a training run that added a token for padding, and embeddings for it to nothing."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    configure(folder, "config.json", vocab_size=6)
    configure(folder, pad_token="<pad>")
    files = load_tokenizer_files(folder)
    assert Tokenizer.from_str(files.tokenizer_json).encode("hello <pad>").ids == [0, 2, 2, 2]
    assert 'tokenizer.json adds ["<pad>"], of which the model has no embeddings (vocab_size 6)' in caplog.text
    configure(folder, "config.json", vocab_size=2)
    with pytest.raises(CheckpointError, match=r'tokenizer\.json has the token "<eot>", which is none of the model\'s 2'):
        load_tokenizer_files(folder)


def test_more_tokens_than_embeddings_are_refused(make_gguf: Callable[..., Path], some_of_smollm2: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"has 3,001 tokens \(tokenizer\.ggml\.tokens\), but embeddings of 3,000"):
        load_tokenizer_files(make_gguf(tokens=[*some_of_smollm2["tokenizer.ggml.tokens"], "one more"]))


def test_torch_is_not_loaded() -> None:
    code = "import sys, gpu.checkpoint.tokenizer_files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
