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
    assert files.eos_token_ids == [2] and files.generation_config == {"eos_token_id": [2]}
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
        return write_gguf(tmp_path / f"{architecture}.gguf", architecture, metadata=given)

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


def test_end_tokens(make_gguf: Callable[..., Path]) -> None:
    files = load_tokenizer_files(make_gguf(eos_token_id=0, eot_token_id=5, eom_token_id=NUM_TOKENS))
    assert files.eos_token == "<|endoftext|>"
    assert files.eos_token_ids == [0, 5, 2]  # and <|im_end|>, which the template writes


def test_sampling_defaults(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
    path = write_gguf(tmp_path / "sampling.gguf", metadata={**tokens, "general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    assert load_tokenizer_files(path).generation_config == {"eos_token_id": [], "temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "has no tokenizer"),
        ({"tokens": None}, "has no tokenizer"),
        ({"model": "t5"}, "is of kind 't5'; supported are"),
        ({"pre": "martian"}, "the pre-tokenizer 'martian', which is not known here; known are default, gpt-2"),
        ({"merges": None}, "has no tokenizer merges"),
        ({"merges": ["a zzz"]}, "is damaged: it merges 'a' and 'zzz', which are not tokens"),
        ({"merges": ["azzz"]}, "is damaged: it merges 'azzz' and '', which are not tokens"),
        ({"model": "llama", "merges": None}, "neither tokenizer merges nor a score for each token"),
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


def test_sentence_piece_has_transformers_tokens(sentence_piece: Path) -> None:
    theirs, ours = transformers_tokenizer(sentence_piece), tokenizer_of(sentence_piece)
    for text in TEXTS:
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
    assert files.tokenizer_config == {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 9}
    assert files.generation_config == {"eos_token_id": [5, 4], "temperature": 0.6}


def test_the_models_configuration_names_the_end_where_nothing_else_does(folder: Path) -> None:
    configure(folder, "config.json", eos_token_id=4)
    assert load_tokenizer_files(folder).eos_token_ids == [4]


def test_end_tokens_that_the_model_lacks_are_left_out(folder: Path) -> None:
    configure(folder, "config.json", eos_token_id=[4, 7, -1], vocab_size=6)
    assert load_tokenizer_files(folder).eos_token_ids == [4]


def test_what_is_added_is_tokenizer_jsons_to_say(folder: Path) -> None:
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
    assert files.chat_template == "one" and "chat_template" not in files.tokenizer_config
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer_files(folder).chat_template == "file"


def test_what_is_wrong_with_a_directory_is_said(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model at"):
        load_tokenizer_files(folder / "nowhere")
    configure(folder, "generation_config.json")
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not a JSON object"):
        load_tokenizer_files(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer_files(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; it has tokenizer\.model: load it with transformers"):
        load_tokenizer_files(folder)


def test_torch_is_not_loaded() -> None:
    code = "import sys, gpu.tokenizer_files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
