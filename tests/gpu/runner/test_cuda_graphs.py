"""Padded decodes: to what size, without disturbing other rows or touching their KV; and replayed from CUDA graphs on a GPU."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import DummyCheckpoint, open_checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.errors import UnsupportedConfiguration
from gpu.models.kv_cache import KVCache
from gpu.models.load import load_model
from gpu.numerics import Numerics
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner import cuda_graphs
from gpu.runner.cuda_graphs import CudaGraphs, PaddedDecode, Shape, capture_sizes
from gpu.runner.input_batch import Batch
from gpu.runner.runner import ModelRunner
from tests.gpu.engine_stub import Driver, make_config, make_runner
from tests.gpu.tiny_models import SIZES, save_model

ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=1)
ONE_TOKEN = SamplingParams(temperature=0.0, logprobs=-1, allowed_token_ids=[7])  # raw logprobs, whatever the model thinks
LENGTHS = (5, 17, 33, 16, 70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_model("llama", path)
    return path


def pad(runner, sizes):
    width = runner.batch.block_tables.shape[1]
    runner.decode = PaddedDecode(runner.model, runner.kv, sizes, width, runner.numerics.activations, runner.device)
    return runner


def start(runner, lengths=LENGTHS, chunk=10_000, sampling=ALL_LOGPROBS):
    """A driver whose rows have their prompts computed and one token each, with their logprobs."""
    driver, generator = Driver(runner), np.random.default_rng(3)
    for row, length in enumerate(lengths):
        driver.add(2 * row + 1, generator.integers(3, 300, length).tolist(), sampling)
    driver.generate(1, chunk)
    return driver


def decode(driver, rows):
    """One step of these rows; [rows, vocab] logprobs of all tokens by id."""
    output = driver.run(dict.fromkeys(rows, 1))
    logprobs = np.empty((len(rows), 300), np.float32)
    for place, entry in enumerate(output.logprobs):
        logprobs[place, entry.token_ids] = entry.logprobs
    return logprobs


def cache_of(runner):
    return torch.stack([torch.stack((keys.transpose(2, 3), values)) for keys, values in runner.kv.layers])


@pytest.mark.parametrize("most", [1, 2, 3, 5, 100, 256, 300, 4000])
def test_default_sizes_serve_every_batch_with_little_padding(most):
    sizes = capture_sizes([], most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 512)
    for count in range(1, sizes[-1] + 1):
        assert next(size for size in sizes if size >= count) - count <= max(3, count // 4, 7 * (count < 128))


def test_wanted_sizes():
    assert capture_sizes([16, 4, 600, 4], 1000) == [4, 16, 600]
    assert capture_sizes([16, 4, 600], 64) == [4, 16]
    with pytest.raises(UnsupportedConfiguration, match="at least 1"):
        capture_sizes([4, 0], 64)


def test_which_steps_are_padded_and_to_what(folder):
    runner = pad(make_runner(make_config(folder)), [2, 4])
    driver, sizes = start(runner), []
    runner.decode.run = lambda shape: sizes.append(shape.rows) or runner.decode.compute(shape)
    for rows, expected in (((1,), 2), ((1, 9), 2), ((7, 3, 1), 4), ((1, 3, 5, 7), 4), ((1, 3, 5, 7, 9), None)):
        sizes.clear()
        driver.run(dict.fromkeys(rows, 1))
        assert sizes == ([] if expected is None else [expected])
    sizes.clear()
    driver.add(0, [5, 6, 7])
    driver.run({0: 3})  # a prompt
    driver.add(2, [5, 6])
    driver.run({1: 1, 2: 2})  # a prompt beside a decode
    assert sizes == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_padding_changes_no_logits_and_no_cache(folder, dtype):
    plain, padded = make_runner(make_config(folder, dtype)), pad(make_runner(make_config(folder, dtype)), [8])
    drivers = start(plain), start(padded)
    # float16's kernels give a row the same bits in every batch; float32's product sums in another order for other sizes
    error = {"atol": 0.0, "rtol": 0.0} if dtype == "float16" else {"atol": 1e-5, "rtol": 1e-4}
    for rows in ((1, 3, 5, 7, 9), (3, 9), (9, 5, 1), (7,)):  # later steps find what earlier, larger ones left behind
        before = cache_of(padded)
        first, second = (decode(driver, rows) for driver in drivers)
        np.testing.assert_allclose(second, first, **error)
        changed = (cache_of(padded) != before).any(5).any(3).any(1).any(0)  # [num_blocks, block_size]
        assert int(changed.sum()) == len(rows) and not changed[0].any()
        torch.testing.assert_close(cache_of(padded), cache_of(plain), **error)
    assert drivers[0].tokens == drivers[1].tokens


def test_leftovers_of_an_ended_request_are_not_read(folder):
    runner = pad(make_runner(make_config(folder, "float16")), [4])
    driver = start(runner)
    decode(driver, (5, 7, 9))
    block = driver.blocks[9][0]
    for keys, values in runner.kv.layers:  # what the static tables still name belongs to nobody any more
        keys[block], values[block] = torch.nan, torch.nan
    runner.decode.slots.fill_(0)
    runner.decode.context_lens.fill_(7)
    before = cache_of(runner)[:, :, 0]
    assert np.isfinite(decode(driver, (1,))).all()
    assert torch.equal(cache_of(runner)[:, :, 0], before)


def test_prompt_chunks_of_one_token_sample_only_at_their_end(folder):
    runner = pad(make_runner(make_config(folder, "float16")), [1, 4])
    expected = start(make_runner(make_config(folder, "float16")), (3, 4))
    driver = start(runner, (3, 4), chunk=1)
    assert driver.tokens == expected.tokens
    entries = [(e.row, e.position) for output in driver.outputs for e in output.prompt_logprobs]
    assert sorted(entries) == [(1, 1), (1, 2), (3, 1), (3, 2), (3, 3)]


def test_a_captured_step_reads_no_tensor_and_launches_the_same_whatever_it_holds():
    """Tensors of torch's meta device have shapes alone: code that reads their values, as no captured code may, is refused."""
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    meta, dtype = torch.device("meta"), torch.bfloat16
    config = ArchitectureConfig.from_hf_config(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "head_dim": 8}
    )
    model = load_model(DummyCheckpoint(config), Numerics(dtype, dtype), meta, TensorParallelGroup())
    model.rotary.ensure(512)
    decode = PaddedDecode(model, KVCache(3, 10, 16, 2, 8, dtype, meta), [1, 4], 128, dtype, meta)
    batch = Batch(8, 2000, 16, 300, meta)
    none = np.zeros(0, np.int32)
    new = [NewRequest(row, np.arange(9, dtype=np.int32), 9, 8, np.array([row + 1], np.int32), ALL_LOGPROBS, 0) for row in range(3)]
    plan = SchedulerOutput(0, [], new, none, none, np.arange(3, dtype=np.int32), np.ones(3, np.int32), 3)
    batch.apply(plan)
    step = batch.make_step(plan)
    assert step.token_ids.device == meta and decode.shape_of(step) == Shape(4, 128)

    def record(work):
        launches = []
        with mock.patch.object(JITFunction, "run", lambda kernel, *a, **k: launches.append((kernel.__name__, k["grid"]))):
            work()
        return launches

    launches = record(lambda: decode.compute(Shape(4, 128)))
    assert record(lambda: decode(step, Shape(4, 128))) == launches
    names = [name for name, _ in launches]
    assert {"_rope_kv_write_kernel", "_attend_decode_kernel", "_fold_segments_kernel", "_silu_mul_kernel"} <= set(names)
    assert len(names) == 3 * 6 + 1  # a layer's two norms, rotation, two of attention, gate; the last norm


def test_steps_of_few_rows_and_short_contexts_have_graphs_of_their_own(folder, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SHORT_CONTEXT", 64)
    monkeypatch.setattr(cuda_graphs, "FEW_ROWS", 2)
    runner = pad(make_runner(make_config(folder, "float16")), [1, 4])
    decode, full = runner.decode, runner.batch.block_tables.shape[1]
    assert decode.shapes() == [Shape(4, full), Shape(1, full), Shape(1, 4)]
    expected, driver = start(make_runner(make_config(folder, "float16")), (63, 5)), start(runner, (63, 5))
    whole, shapes = runner.batch.make_step, []

    def as_on_a_gpu(plan):  # which is sent only as much of the tables as the step reads
        step = whole(plan)
        width = -(-int(step.attention.context_lens.max()) // 16)
        step.attention.block_tables = step.attention.block_tables[:, :width]
        return step

    monkeypatch.setattr(runner.batch, "make_step", as_on_a_gpu)
    decode.run = lambda shape: shapes.append(shape) or PaddedDecode.run(decode, shape)
    for rows in ((1,), (1,), (3,), (1, 3)):
        assert driver.run(dict.fromkeys(rows, 1)).token_ids.tolist() == expected.run(dict.fromkeys(rows, 1)).token_ids.tolist()
    assert shapes == [Shape(1, 4), Shape(1, full), Shape(1, 4), Shape(4, full)]


def test_capture_warms_up_before_it_and_begins_with_the_largest(folder, monkeypatch):
    runner = make_runner(make_config(folder))
    width = runner.batch.block_tables.shape[1]
    decode = CudaGraphs(runner.model, runner.kv, [1, 4], width, torch.float32, runner.device)
    done = []
    monkeypatch.setattr(decode, "compute", lambda shape: done.append(shape.rows))
    capture = mock.create_autospec(torch.cuda.graph, side_effect=lambda graph, **how: done.append("capture") or nullcontext())
    names = ("Stream", "stream", "current_stream", "graph_pool_handle", "synchronize")
    made = mock.Mock(side_effect=lambda: mock.Mock(spec=["replay"]))
    with mock.patch.multiple(torch.cuda, graph=capture, CUDAGraph=made, **{name: mock.MagicMock() for name in names}):
        decode.capture()
    assert done == [4, "capture", 4, 1, "capture", 1]
    assert len({how.kwargs["pool"] for how in capture.call_args_list}) == 1
    decode.run(Shape(1, width))
    assert [decode.graphs[Shape(rows, width)].replay.call_count for rows in (1, 4)] == [1, 0]


def test_a_cpu_captures_nothing(folder):
    runner = make_runner(make_config(folder))
    assert runner.decode is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replay_computes_what_launches_do(folder, dtype):
    def make(**more):
        config = make_config(folder, dtype, **more)
        runner = ModelRunner(config, open_checkpoint(str(folder)), torch.device("cuda", 0), TensorParallelGroup())
        runner.load(lambda fraction: None)
        runner.allocate_kv(400, 512)
        return runner

    eager, graphs = make(enforce_eager=True), make(cuda_graph_sizes=[1, 4, 8])
    assert eager.decode is None and isinstance(graphs.decode, CudaGraphs)
    drivers = start(eager, sampling=ONE_TOKEN), start(graphs, sampling=ONE_TOKEN)
    error = {"bfloat16": 0.1, "float32": 1e-3}[dtype]
    for rows in ((1, 3, 5, 7, 9), (3, 9), (9, 5, 1), (7,)):
        first, second = (decode(driver, rows) for driver in drivers)
        np.testing.assert_allclose(second, first, atol=error)
