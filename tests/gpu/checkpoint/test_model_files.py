"""Where a model lies and what it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.checkpoint.model_files import find_model, model_name
from gpu.errors import CheckpointError

BLOB = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models as people and the hub's cache lay them out."""
    for name in (f"blobs/{BLOB}", "plain/tiny-chat.Q4_1.gguf", "one/only.gguf", "two/a.gguf", "two/b.gguf", "full/extra.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for index in (1, 2):
        (tmp_path / f"plain/big-0000{index}-of-00002.gguf").touch()
    for folder in ("Qwen2.5-0.5B", "split", "ein Modell für Grüße", "hub/models--org--tiny-chat/snapshots/0a1b"):
        (tmp_path / folder).mkdir(parents=True)
    for index in (1, 2):
        (tmp_path / f"split/big-0000{index}-of-00002.gguf").touch()
    (tmp_path / "full/model.safetensors").touch()
    (tmp_path / "tiny-chat.gguf").symlink_to(f"blobs/{BLOB}")
    (tmp_path / "hub/models--org--tiny-chat/snapshots/0a1b/tiny-chat.GGUF").symlink_to(tmp_path / "blobs" / BLOB)
    (tmp_path / "linked-chat").symlink_to("Qwen2.5-0.5B")
    (tmp_path / "hub/models--gpt2/snapshots/77").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tiny-chat.gguf", "tiny-chat"),
        ("linked-chat", "linked-chat"),
        ("linked-chat/", "linked-chat"),
        ("linked-chat/.", "linked-chat"),
        ("~/linked-chat", "linked-chat"),
        ("plain/tiny-chat.Q4_1.gguf", "tiny-chat.Q4_1"),
        ("plain/../tiny-chat.gguf", "tiny-chat"),
        ("plain/big-00001-of-00002.gguf", "big"),
        ("Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("Qwen2.5-0.5B///", "Qwen2.5-0.5B"),
        ("./Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("ein Modell für Grüße", "ein Modell für Grüße"),
        ("one", "only"),
        ("split", "big"),
        ("full", "full"),
        ("hub/models--gpt2/snapshots/77", "gpt2"),
        ("hub/models--gpt2/snapshots/77/", "gpt2"),
        ("hub/models--org--tiny-chat/snapshots/0a1b", "tiny-chat"),
        (f"blobs/{BLOB}", BLOB),
        ("/models/gone.gguf", "gone"),
        ("/models/gone/", "gone"),
        ("/", "model"),
    ],
)
def test_a_model_is_called_what_its_path_says(path: str, name: str, models: Path) -> None:
    assert model_name(path) == name
    if (models / path).exists():
        assert model_name(models / path) == name


def test_a_path_without_a_name_is_called_as_the_directory_it_leads_to(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("Qwen2.5-0.5B")
    assert model_name(".") == "Qwen2.5-0.5B"
    monkeypatch.chdir(models / "hub/models--gpt2/snapshots/77")
    assert model_name("./") == "gpt2"
    assert model_name("..") == "snapshots"


def test_a_directory_with_one_gguf_file_stands_for_it(models: Path) -> None:
    assert find_model("one") == Path("one/only.gguf")
    assert find_model("split") == Path("split/big-00001-of-00002.gguf")
    assert find_model("~/full") == models / "full"
    with pytest.raises(CheckpointError, match=r"two holds 2 GGUF files: give the path of one of them \(a\.gguf, b\.gguf\)"):
        find_model("two")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "there is no model at nowhere: give a safetensors directory or a .gguf file"),
        ("tiny-chat.gguf/config.json", "there is no model at"),
        ("~nobody-of-that-name/model", "cannot be opened"),
        ("x" * 300, "cannot be opened"),
        ("a\0b", "there is no model at"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str, models: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(path)
