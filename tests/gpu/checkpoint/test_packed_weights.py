"""Packed weights in a folder: written once, mapped by all, made anew when they cannot be trusted."""

import fcntl
import logging
import multiprocessing
import os

import numpy as np
import psutil
import pytest
import torch

from gpu.checkpoint.packed_matrix import PackedMatrix
from gpu.checkpoint.packed_weights import MOST_MODELS, PrivateWeights, SharedWeights, open_weights, packed_name
from gpu.checkpoint.weights import open_checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.models.load import load_model
from gpu.numerics import Numerics
from kernels.cpu.quantized_blocks import quantize

CPU = torch.device("cpu")


def matrices():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    return {
        "plain": PackedMatrix.plain(weight),
        "bfloat16": PackedMatrix.plain(weight.bfloat16()),
        "half": PackedMatrix.half(weight),
        "bfloat": PackedMatrix.bfloat(weight),
        "blocks": PackedMatrix.blocks([quantize(weight.numpy())], 64),
    }


NAME = f"{'0' * 32}-0-of-1.weights"


def fill(path, made=None):
    weights = SharedWeights(path)
    result = {name: weights.matrix(name, lambda packed=packed: packed) for name, packed in (made or matrices()).items()}
    weights.close()
    return result


def not_needed():
    raise AssertionError("packed again")


def assert_same(a, b):
    assert {k: v for k, v in vars(a).items() if k != "arrays"} == {k: v for k, v in vars(b).items() if k != "arrays"}
    assert a.arrays.keys() == b.arrays.keys()
    for key, array in a.arrays.items():
        assert array.dtype == b.arrays[key].dtype
        np.testing.assert_array_equal(array, b.arrays[key])


def assert_mapped(path):
    weights = SharedWeights(path)
    for name, packed in matrices().items():
        assert_same(weights.matrix(name, not_needed), packed)
    weights.close()


def test_the_written_weights_are_mapped(tmp_path):
    first = fill(tmp_path / NAME)
    for name, packed in matrices().items():
        assert_same(first[name], packed)
    assert_mapped(tmp_path / NAME)
    assert torch.equal(first["bfloat16"].tensor(), matrices()["bfloat16"].tensor())


def test_a_draft_of_a_killed_process_is_not_used(tmp_path):
    def die_in_the_middle():
        SharedWeights(tmp_path / NAME).matrix("half", lambda: matrices()["half"])
        os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=die_in_the_middle)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert_same(fill(tmp_path / NAME)["half"], matrices()["half"])
    assert_mapped(tmp_path / NAME)


def test_the_second_of_two_waits_for_the_first(tmp_path):
    first = SharedWeights(tmp_path / NAME)
    reader, writer = os.pipe()
    tell = logging.StreamHandler(os.fdopen(writer, "w", closefd=False))

    def second():
        logger = logging.getLogger("gpu.file_lock")
        logger.setLevel(logging.INFO)
        logger.addHandler(tell)
        weights = SharedWeights(tmp_path / NAME)
        weights.matrix("half", not_needed)
        os.write(writer, b"mapped\n")
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=second)
    process.start()
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.readline() == "another process packs these weights; waiting for it\n"
        for name, packed in matrices().items():
            first.matrix(name, lambda packed=packed: packed)
        first.close()
        assert told.readline() == "mapped\n"
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("damage", ["cut off", "{}x", "[]", "null", '{"half": 1}', '{"half": {"arrays": {"a": [0, "?!", [1]]}}}'])
def test_a_damaged_file_is_made_anew(tmp_path, damage, caplog):
    path = tmp_path / NAME
    fill(path)
    if damage == "cut off":
        os.truncate(path, 100)
    else:
        path.write_bytes(bytes(100) + damage.encode() + len(damage).to_bytes(8, "little"))
    fill(path)
    assert_mapped(path)
    assert "damaged" in caplog.text


def test_a_matrix_that_is_not_in_the_file_is_packed_privately(tmp_path):
    some = {"half": matrices()["half"]}
    fill(tmp_path / NAME, some)
    assert_same(fill(tmp_path / NAME)["blocks"], matrices()["blocks"])


def test_a_full_disk_costs_a_warning_and_leaves_nothing(tmp_path, caplog, monkeypatch):
    weights = SharedWeights(tmp_path / NAME)
    kept = weights.matrix("half", lambda: matrices()["half"])
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert_same(weights.matrix("blocks", lambda: matrices()["blocks"]), matrices()["blocks"])
    assert_same(weights.matrix("plain", lambda: matrices()["plain"]), matrices()["plain"])
    weights.close()
    assert_same(kept, matrices()["half"])
    assert "No space left" in caplog.text
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}
    fill(tmp_path / NAME)
    assert_mapped(tmp_path / NAME)


def test_the_models_used_last_are_kept_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "model.safetensors").write_text("precious")
    names = [f"{number:032x}-{rank}-of-2.weights" for number in range(MOST_MODELS + 2) for rank in range(2)]
    for number, name in enumerate(names):
        fill(tmp_path / name)
        os.utime(tmp_path / name, (number, number))
        (tmp_path / f"{name.removesuffix('.weights')}-{'a' * 16}.step").write_text("5")  # gpu.runner.step_profile's
    fill(tmp_path / NAME.replace("0" * 32, "f" * 32))
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".weights")
    assert left == [*names[-2 * (MOST_MODELS - 1) :], NAME.replace("0" * 32, "f" * 32)]
    steps = [f"{name.removesuffix('.weights')}-{'a' * 16}.step" for name in names[-2 * (MOST_MODELS - 1) :]]
    assert sorted(path.name for path in tmp_path.glob("*.step")) == steps
    assert (tmp_path / "mine").is_dir()
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_a_folder_that_cannot_be_used_costs_a_warning_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    packed = open_weights(str(tmp_path / "file"), NAME).matrix("half", lambda: matrices()["half"])
    assert_same(packed, matrices()["half"])
    assert "not shared" in caplog.text


def assert_unlocked(path):
    """No process holds the file's lock: the next one that packs it need not wait."""
    with path.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_draft_that_cannot_be_opened_leaves_no_lock(tmp_path, caplog):
    path = tmp_path / NAME
    path.with_suffix(".new").mkdir()  # in the draft's way
    assert isinstance(open_weights(str(tmp_path), NAME), PrivateWeights)
    assert "not shared" in caplog.text
    assert_unlocked(path)


def test_weights_that_are_abandoned_leave_neither_lock_nor_file(tmp_path):
    weights = SharedWeights(tmp_path / NAME)
    kept = weights.matrix("half", lambda: matrices()["half"])
    weights.abandon()
    assert_same(kept, matrices()["half"])
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert_unlocked(tmp_path / NAME)
    weights.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("make", ["gave up", "has it mapped"])
def test_a_process_that_abandons_its_weights_leaves_another_processs_draft_alone(tmp_path, make):
    path = tmp_path / NAME
    if make == "has it mapped":
        fill(path)
    weights = SharedWeights(path)
    if make == "gave up":
        weights.abandon()
    path.with_suffix(".new").write_text("another's")
    weights.abandon()
    assert path.with_suffix(".new").read_text() == "another's"


def test_a_model_that_cannot_be_built_releases_the_lock(tmp_path, smollm2_gguf, monkeypatch):
    numerics = Numerics.choose("auto", "int8", CPU)
    with monkeypatch.context() as patch:
        patch.setattr("gpu.models.decoder.MLP", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            load(smollm2_gguf, tmp_path, numerics)
    (lock,) = tmp_path.iterdir()
    assert_unlocked(lock)


def load(model, folder, numerics):
    with open_checkpoint(str(model)) as checkpoint:
        weights = open_weights(str(folder), packed_name(checkpoint, numerics, TensorParallelGroup()))
        return load_model(checkpoint, numerics, CPU, TensorParallelGroup(), weights=weights)


@pytest.mark.parametrize("quantization", ["none", "int8", "gguf"])
def test_a_model_computes_the_same_from_the_folder(tmp_path, smollm2_gguf, quantization):
    numerics = Numerics.choose("auto", quantization, CPU)

    def logits():
        model = load(smollm2_gguf, tmp_path, numerics)
        hidden = model.embedding(torch.arange(5))
        return hidden, model.logits(model.layers[0].mlp(hidden)), model.weight_bytes

    first, second = logits(), logits()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]
    assert len(list(tmp_path.glob("*.weights"))) == 1


def test_engines_on_one_folder_share_the_memory(tmp_path, smollm2_gguf):
    """Two processes have used all weights. Their memory is counted with each page divided by the processes that map it."""
    numerics = Numerics.choose("auto", "gguf", CPU)

    def hold(ready, release, counted):
        model = load(smollm2_gguf, tmp_path, numerics)
        one = torch.ones(1, model.config.hidden_size)
        for layer in model.layers:  # touches every page
            layer.mlp(layer.attention.output(layer.attention.qkv(one)[:, : model.config.hidden_size].contiguous()))
        model.logits(one)
        ready.put(model.weight_bytes)
        release.wait()
        maps = psutil.Process().memory_maps(grouped=False)
        ready.put(sum(each.pss for each in maps if each.path.endswith(".weights")))
        counted.wait()

    hold_once = multiprocessing.get_context("fork")
    ready, release, counted = hold_once.Queue(), hold_once.Event(), hold_once.Event()
    holders = [hold_once.Process(target=hold, args=(ready, release, counted)) for _ in range(2)]
    for holder in holders:
        holder.start()
    weight_bytes = max(ready.get(timeout=60) for _ in holders)
    release.set()
    held = [ready.get(timeout=60) for _ in holders]
    counted.set()
    for holder in holders:
        holder.join()
    assert sum(held) == pytest.approx(weight_bytes, rel=0.02)
