"""Perplexity of a model by numeric class and type of KV, beside float32 on the same file.

    python -m benchmarks.perplexity MODEL [--tokens 20000] [--window 512] [--threads 2] [--classes float32 int8 ...]

The text is the Python reference as it comes with the interpreter: English prose with some code, the same on every machine with this
Python. It is cut into windows, each a prompt of its own, whose tokens but the first are scored by their prompt logprobs.
"""

from __future__ import annotations

import argparse
import dataclasses
import pydoc_data.topics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.llm import LLM
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.config import ModelConfig
from gpu.plan import SamplingParams

NUM_TOKENS = 20_000
WINDOW = 512
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
EXACT = "float32"
HALVES = ("float16", "bfloat16")


def numeric_classes() -> dict[str, dict[str, str]]:
    """Name -> options: each type of weights, and each quantization with its own type of KV."""
    (quantization,) = (field for field in dataclasses.fields(ModelConfig) if field.name == "quantization")
    return {
        EXACT: {"dtype": "float32", "quantization": "none"},
        **{dtype: {"dtype": dtype, "quantization": "none", "kv_cache_dtype": "float32"} for dtype in HALVES},
        **{f"{dtype}, 16-bit KV": {"dtype": dtype, "quantization": "none"} for dtype in HALVES},
        **{choice: {"quantization": choice} for choice in quantization.metadata["choices"] if choice not in ("auto", "none")},
    }


def read_text(model: str, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The first `num_tokens` token ids of the text. Raises ValueError when it has fewer."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = Tokenizer.from_str(load_tokenizer_files(model).tokenizer_json).encode(text, add_special_tokens=False).ids
    if len(ids) < num_tokens:
        raise ValueError(f"the text has {len(ids):,} tokens, fewer than {num_tokens:,}")
    return ids[:num_tokens]


@dataclass(frozen=True)
class Score:
    perplexity: float
    num_scored: int
    seconds: float


def score(model: str, token_ids: list[int], options: dict[str, Any], window: int = WINDOW, num_threads: int = 1) -> Score:
    """Score the text in one class by the engine itself: its scheduler, cache and kernels. A window is one step."""
    windows = [token_ids[begin : begin + window] for begin in range(0, len(token_ids), window)]
    blocks = 2 * (window // 16 + 2)
    engine = {
        "num_threads": num_threads,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 1,
        "max_num_batched_tokens": window,
        "max_model_len": window + 1,
    }
    with LLM(model, device="cpu", enable_prefix_caching=False, **engine, **options) as llm:
        started = time.perf_counter()
        answers = llm.generate([each for each in windows if len(each) > 1], SCORED)
        seconds = time.perf_counter() - started
    logprobs = np.concatenate([part.logprobs for answer in answers for part in answer.prompt_logprobs]).astype(np.float64)
    return Score(float(np.exp(-logprobs.mean())), len(logprobs), seconds)


def main() -> None:
    classes = numeric_classes()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a .gguf file or a safetensors directory")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--classes", nargs="+", choices=list(classes), default=list(classes), metavar="CLASS")
    options = parser.parse_args()
    text = read_text(options.model, options.tokens)
    table = Table(title=f"{options.tokens:,} tokens in windows of {options.window}")
    for column in ("class", "perplexity", f"against {EXACT}", "tokens scored", "seconds"):
        table.add_column(column, justify="left" if column == "class" else "right")
    exact = None
    for name in dict.fromkeys([EXACT, *options.classes]):
        found = score(options.model, text, classes[name], options.window, options.threads)
        exact = exact or found.perplexity
        print(f"{name}: {found.perplexity:.4f}", file=sys.stderr, flush=True)
        table.add_row(
            name, f"{found.perplexity:.4f}", f"{found.perplexity / exact - 1:+.3%}", f"{found.num_scored:,}", f"{found.seconds:.0f}"
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
