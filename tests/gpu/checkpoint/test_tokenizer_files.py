"""Tokenizers and generation defaults out of directories: the same as transformers reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.errors import CheckpointError
from tests.gpu.checkpoint.tokenizer_texts import TEXTS, transformers_tokenizer


def test_a_directory_has_transformers_tokens(smollm2_hf: Path) -> None:
    theirs, files = transformers_tokenizer(smollm2_hf), load_tokenizer_files(smollm2_hf)
    ours = Tokenizer.from_str(files.tokenizer_json)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text), text
    assert files.chat_template == theirs.chat_template
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<|im_start|>", "<|im_end|>", [2])


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


def test_torch_is_not_loaded() -> None:
    code = "import sys, gpu.checkpoint.tokenizer_files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
