"""Steps of pure decodes, padded to one of a few sizes, in tensors of fixed addresses: on a GPU each size is one CUDA graph.

A decode of one token a request makes some ten launches a layer, each of which costs a CPU more time than a small batch costs the
GPU. Their number and shapes depend on the number of rows alone, so that a graph captured for `size` rows serves every step of that
many. Padding has the slot -1, where nothing is written, and a context of 0, of which nothing is read.

`PaddedDecode` runs on any device; `CudaGraphs` adds capture and replay, nothing else.
"""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass

import torch

from gpu.errors import UnsupportedConfiguration
from gpu.models.attention import AttentionMetadata
from gpu.models.decoder import CausalLM
from gpu.models.kv_cache import KVCache
from gpu.runner.input_batch import Step

MOST_ROWS = 512  # captured by default: beyond it products, not launches, take the time
# Attention of few rows has programs for each part of the longest context that block tables can hold, some 2,000 a row where that is
# 128 Ki tokens: steps whose contexts are short have graphs, and tables, of their own.
FEW_ROWS = 32
SHORT_CONTEXT = 8192  # tokens

logger = logging.getLogger(__name__)


def capture_sizes(wanted: list[int], max_num_seqs: int) -> list[int]:
    """Ascending: `wanted`, or by default sizes of which none is much larger than the one before, each at most max_num_seqs.

    Raises UnsupportedConfiguration for a size below 1.
    """
    if any(size < 1 for size in wanted):
        raise UnsupportedConfiguration(f"--cuda-graph-sizes are numbers of requests, at least 1, not {wanted}")
    most = min(max_num_seqs, MOST_ROWS)
    sizes = wanted or [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, MOST_ROWS + 1, 32), most]
    return sorted({size for size in sizes if size <= (max_num_seqs if wanted else most)})


@dataclass(frozen=True)
class Shape:
    """The size to which a step is padded."""

    rows: int
    table_width: int  # blocks that a request may have


class PaddedDecode:
    """The forward pass of steps in which each request has one token."""

    def __init__(
        self, model: CausalLM, kv: KVCache, sizes: list[int], table_width: int, activations: torch.dtype, device: torch.device
    ) -> None:
        """sizes ascending; table_width: blocks that the longest request may have."""
        self.model = model
        self.kv = kv
        self.sizes = sizes
        self.block_size = kv.layers[0][1].shape[2]
        most, config = sizes[-1], model.config
        self.token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(most, table_width, dtype=torch.int32, device=device)
        self.rows = torch.arange(most, dtype=torch.int32, device=device)
        self.query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.hidden = torch.empty(most, config.hidden_size, dtype=activations, device=device)
        self.logits = torch.empty(most, config.vocab_size, dtype=torch.float32, device=device)

    def shapes(self) -> list[Shape]:
        """All there are, those of most rows first."""
        return [Shape(rows, width) for rows in reversed(self.sizes) for width in reversed(self._widths(rows))]

    def shape_of(self, step: Step) -> Shape | None:
        """None: the step is not for here."""
        count = len(step.rows)
        if count != int(step.query_start[-1]) or count > self.sizes[-1]:
            return None
        rows = self.sizes[bisect.bisect_left(self.sizes, count)]
        widths = self._widths(rows)
        return Shape(rows, widths[bisect.bisect_left(widths, step.attention.block_tables.shape[1])])

    def _widths(self, rows: int) -> list[int]:
        full = self.block_tables.shape[1]
        short = SHORT_CONTEXT // self.block_size
        return [short, full] if rows <= FEW_ROWS and short < full else [full]

    def __call__(self, step: Step, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """shape as `shape_of` says. (hidden states of the tokens, logits of the sampling ones), valid until the next call."""
        self.fill(step, shape)
        self.run(shape)
        count = len(step.rows)
        logits = self.logits[:count]
        return self.hidden[:count], logits if len(step.sampled) == count else logits[torch.from_numpy(step.sampled)]

    def fill(self, step: Step, shape: Shape) -> None:
        """The step's input, then what pads it."""
        count, attention = len(step.rows), step.attention
        for static, values, padding in (
            (self.token_ids, step.token_ids, 0),
            (self.positions, step.positions, 0),
            (self.slots, attention.slots, -1),
            (self.context_lens, attention.context_lens, 0),
        ):
            static[:count] = values
            static[count : shape.rows] = padding
        self.block_tables[:count, : attention.block_tables.shape[1]] = attention.block_tables[attention.rows]

    def run(self, shape: Shape) -> None:
        """Fills `hidden` and `logits` of the shape's rows."""
        self.compute(shape)

    def compute(self, shape: Shape) -> None:
        rows = shape.rows
        attention = AttentionMetadata(
            block_tables=self.block_tables[:rows, : shape.table_width],
            rows=self.rows[:rows],
            query_start=self.query_start[: rows + 1],
            context_lens=self.context_lens[:rows],
            slots=self.slots[:rows],
        )
        hidden = self.model.forward(self.token_ids[:rows], self.positions[:rows], self.kv, attention)
        self.hidden[:rows] = hidden
        self.logits[:rows] = self.model.logits(hidden)


class CudaGraphs(PaddedDecode):
    """Each shape captured once, at the start. Graphs share the memory of what they compute in between: one runs at a time."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Of padding alone, which launches what a full step launches."""
        started = time.perf_counter()
        self.graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        stream = torch.cuda.Stream(self.hidden.device)  # type: ignore[no-untyped-call]  # torch leaves it without types
        pool = torch.cuda.graph_pool_handle()
        for shape in self.shapes():  # the largest first: what it took serves the others
            stream.wait_stream(torch.cuda.current_stream(self.hidden.device))
            with torch.cuda.stream(stream):
                self.compute(shape)  # compiles kernels and makes cuBLAS's workspace, neither of which can be captured
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.compute(shape)
            self.graphs[shape] = graph
        torch.cuda.synchronize(self.hidden.device)
        seconds = time.perf_counter() - started
        logger.info("captured %d CUDA graphs of up to %d requests in %.1f s", len(self.graphs), self.sizes[-1], seconds)

    def run(self, shape: Shape) -> None:
        self.graphs[shape].replay()
