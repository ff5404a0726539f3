"""Packed weights in a folder: written once, mapped by all, made anew when they cannot be trusted."""

import multiprocessing
import os
import time

import numpy as np
import psutil
import pytest
import torch

from gpu.distributed import TensorParallelGroup
from gpu.linear import Numerics
from gpu.models import load_model
from gpu.packed import MOST_MODELS, PackedMatrix, SharedWeights, open_weights, packed_identity
from gpu.weights import open_checkpoint
from kernels.blocks import quantize

CPU = torch.device("cpu")


def matrices():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    return {
        "plain": PackedMatrix.plain(weight),
        "bfloat16": PackedMatrix.plain(weight.bfloat16()),
        "half": PackedMatrix.half(weight),
        "blocks": PackedMatrix.blocks(quantize(weight.numpy()), 64),
    }


def fill(folder):
    weights = SharedWeights(folder)
    made = {name: weights.matrix(name, lambda packed=packed: packed) for name, packed in matrices().items()}
    weights.close()
    return made


def not_needed():
    raise AssertionError("packed again")


def assert_same(a, b):
    assert {k: v for k, v in vars(a).items() if k != "arrays"} == {k: v for k, v in vars(b).items() if k != "arrays"}
    assert a.arrays.keys() == b.arrays.keys()
    for key, array in a.arrays.items():
        assert array.dtype == b.arrays[key].dtype
        np.testing.assert_array_equal(array, b.arrays[key])


def test_what_was_written_is_mapped(tmp_path):
    first = fill(tmp_path / "model")
    weights = SharedWeights(tmp_path / "model")
    for name, packed in matrices().items():
        assert_same(first[name], packed)
        assert_same(weights.matrix(name, not_needed), packed)
    weights.close()
    assert torch.equal(first["bfloat16"].tensor(), matrices()["bfloat16"].tensor())


def test_who_was_killed_while_packing_leaves_nothing_that_is_used(tmp_path):
    folder = tmp_path / "model"

    def die_in_the_middle():
        SharedWeights(folder).matrix("half", lambda: matrices()["half"])
        os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=die_in_the_middle)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert_same(fill(folder)["half"], matrices()["half"])


def test_the_second_of_two_waits_for_the_first(tmp_path):
    folder = tmp_path / "model"
    first = SharedWeights(folder)
    reader, writer = os.pipe()

    def second():
        weights = SharedWeights(folder)
        weights.matrix("half", not_needed)
        os.write(writer, b"mapped")
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=second)
    process.start()
    deadline = time.monotonic() + 30
    while psutil.Process(process.pid).status() == psutil.STATUS_RUNNING and time.monotonic() < deadline:
        time.sleep(0.01)  # until it sleeps at the lock
    for name, packed in matrices().items():
        first.matrix(name, lambda packed=packed: packed)
    first.close()
    assert os.read(reader, 10) == b"mapped"
    process.join()
    assert process.exitcode == 0


def test_data_cut_off_is_packed_again(tmp_path):
    fill(tmp_path / "model")
    os.truncate(tmp_path / "model" / "weights.bin", 100)
    assert_same(fill(tmp_path / "model")["blocks"], matrices()["blocks"])


def test_the_models_used_last_are_kept(tmp_path):
    for number in range(MOST_MODELS + 2):
        fill(tmp_path / str(number))
        os.utime(tmp_path / str(number), (number, number))
    fill(tmp_path / "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "4", "5", "new"]


def test_a_folder_that_cannot_be_used_costs_a_warning_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    packed = open_weights(str(tmp_path / "file"), "model").matrix("half", lambda: matrices()["half"])
    assert_same(packed, matrices()["half"])
    assert "not shared" in caplog.text


def load(model, folder, numerics):
    with open_checkpoint(str(model)) as checkpoint:
        weights = open_weights(str(folder), packed_identity(checkpoint, numerics, TensorParallelGroup()))
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
    assert len(list(tmp_path.iterdir())) == 1


def test_engines_on_one_folder_share_the_memory(tmp_path, smollm2_gguf):
    """What two processes that have used all weights have of them in memory, each page divided by those who hold it."""
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
        ready.put(sum(each.pss for each in maps if each.path.endswith("weights.bin")))
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
