"""Every architecture against transformers: logits of whole prompts, of chunks and of decodes."""

import numpy as np
import pytest
import torch

from gpu.checkpoint.weights import open_checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.errors import CheckpointError
from gpu.models.attention import AttentionMetadata
from gpu.models.kv_cache import KVCache
from gpu.models.load import load_model
from gpu.numerics import Numerics
from tests.gpu.tiny_models import SIZES, VARIANTS, save_model

BLOCK = 16
CPU = torch.device("cpu")
FLOAT32 = Numerics(torch.float32, torch.float32)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(transformers' model, ours) of the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_model(request.param, folder)
    ours = load_model(open_checkpoint(str(folder)), FLOAT32, CPU, TensorParallelGroup())
    ours.rotary.ensure(512)
    return theirs, ours


@torch.inference_mode()
def compute(model, kv, rows_of_blocks, pieces):
    """pieces: (row, first position, token ids) each; returns logits of all their tokens, [num_tokens, vocab]."""
    tables = torch.tensor(rows_of_blocks, dtype=torch.int32)
    lens = [len(tokens) for _, _, tokens in pieces]
    positions = np.concatenate([first + np.arange(len(tokens)) for _, first, tokens in pieces])
    row_of_token = np.repeat([row for row, _, _ in pieces], lens)
    slots = tables.numpy()[row_of_token, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    step = AttentionMetadata(
        tables,
        torch.tensor([row for row, _, _ in pieces], dtype=torch.int32),
        torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32),
        torch.tensor([first + len(tokens) for _, first, tokens in pieces], dtype=torch.int32),
        torch.from_numpy(slots),
    )
    token_ids = torch.tensor([token for _, _, tokens in pieces for token in tokens])
    return model.logits(model.forward(token_ids, torch.from_numpy(positions), kv, step))


def make_kv(model, num_blocks=40, dtype=torch.float32):
    return KVCache(model.config.num_layers, num_blocks, BLOCK, model.num_kv_heads, model.config.head_dim, dtype, CPU)


def random_tokens(length, seed):
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


@torch.inference_mode()
def expected(theirs, tokens):
    return theirs(torch.tensor([tokens])).logits[0]


def test_a_whole_prompt(pair):
    theirs, ours = pair
    tokens = random_tokens(100, 0)
    logits = compute(ours, make_kv(ours), [list(range(7, 0, -1))], [(0, 0, tokens)])
    torch.testing.assert_close(logits, expected(theirs, tokens), atol=1e-4, rtol=0)


def test_chunks_and_decodes_mixed(pair):
    theirs, ours = pair
    first, second = random_tokens(75, 1), random_tokens(60, 2)
    kv, blocks = make_kv(ours), [[1, 3, 5, 7, 9], [2, 4, 6, 8, 0]]
    got_first = [compute(ours, kv, blocks, [(0, 0, first[:33])])]
    got_second = []
    for step in range(3):  # the first decodes while the second's prompt comes in chunks of 19
        begin, chunk = 33 + step, second[19 * step : 19 * (step + 1)]
        logits = compute(ours, kv, blocks, [(1, 19 * step, chunk), (0, begin, first[begin : begin + 1])])
        got_second.append(logits[:-1])
        got_first.append(logits[-1:])
    got_first.append(compute(ours, kv, blocks, [(0, 36, first[36:])]))
    torch.testing.assert_close(torch.cat(got_first), expected(theirs, first), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(got_second), expected(theirs, second)[:57], atol=1e-4, rtol=0)


def test_bfloat16_stays_near_float32(tmp_path):
    theirs = save_model("llama", tmp_path)
    ours = load_model(open_checkpoint(str(tmp_path)), Numerics(torch.bfloat16, torch.bfloat16), CPU, TensorParallelGroup())
    ours.rotary.ensure(512)
    tokens = random_tokens(50, 3)
    logits = compute(ours, make_kv(ours, dtype=torch.bfloat16), [[1, 2, 3, 4]], [(0, 0, tokens)])
    reference = expected(theirs, tokens)
    error = (logits - reference).square().mean().sqrt() / reference.square().mean().sqrt()
    assert error < 0.03, "the root mean square of a bfloat16 error is some 1 % of the logits'"
    theirs_error = (
        expected(theirs.bfloat16(), tokens).float() - reference
    ).square().mean().sqrt() / reference.square().mean().sqrt()
    assert error < 1.5 * theirs_error


def test_progress_and_bytes(tmp_path):
    theirs = save_model("qwen3", tmp_path)
    heard = []
    model = load_model(open_checkpoint(str(tmp_path)), FLOAT32, CPU, TensorParallelGroup(), heard.append)
    assert heard == sorted(heard) and heard[-1] == 1.0 and len(heard) > 20
    assert model.weight_bytes == sum(parameter.nbytes for parameter in theirs.parameters())


def test_tensor_parallel_size_must_divide_the_kv_heads(tmp_path):
    save_model("llama", tmp_path)
    with pytest.raises(CheckpointError, match="size 3 does not divide the model's 2 key-value heads"):
        load_model(open_checkpoint(str(tmp_path)), FLOAT32, CPU, TensorParallelGroup(0, 3))


INT8 = Numerics(torch.float16, torch.float32, "int8")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 64}, "size 2 divides 100 columns of a matrix into parts of 50"),
        ({"intermediate_size": 128}, "size 2 divides 48 columns of a matrix into parts of 24"),
    ],
)
def test_ranks_that_would_cut_int8_blocks_are_refused_before_anything_is_read(tmp_path, monkeypatch, sizes, message):
    monkeypatch.setitem(VARIANTS, "odd", ("Llama", sizes))
    save_model("odd", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    monkeypatch.setattr(checkpoint, "tensor", lambda *_: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint, INT8, CPU, TensorParallelGroup(0, 2))


@pytest.mark.parametrize("size", [2, 4])
def test_int8_values_do_not_depend_on_the_number_of_ranks(tmp_path, monkeypatch, size):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256}
    monkeypatch.setitem(VARIANTS, "even", ("Llama", sizes))
    save_model("even", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    alone = load_model(checkpoint, INT8, CPU, TensorParallelGroup())
    ranks = [load_model(checkpoint, INT8, CPU, TensorParallelGroup(rank, size)) for rank in range(size)]
    rows = torch.arange(SIZES["hidden_size"])
    for whole, *shards in zip(*(model.layers for model in (alone, *ranks)), strict=True):
        for layer_of in (lambda layer: layer.attention.output, lambda layer: layer.mlp.down):
            values = torch.cat([layer_of(shard).linear.rows(rows) for shard in shards], dim=1)
            assert torch.equal(values, layer_of(whole).linear.rows(rows))
