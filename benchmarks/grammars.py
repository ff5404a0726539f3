"""What structured output costs a step, decodes with and without a schema in turns; and the worst that grammars cost.

    python -m benchmarks.grammars MODEL                 # 16 decodes in one thread
    python -m benchmarks.grammars MODEL --rows 1 8 16

With a schema the worker fills each row's mask of allowed tokens, on a thread beside the forward pass, and applies it to the logits.
Hostile grammars are timed alone: how long they take to compile, and their slowest mask. GRAMMAR_LIMITS bounds both.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.driver import Driver
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.checkpoint.weights import open_checkpoint
from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.plan import GRAMMAR_LIMITS, SamplingParams

CONTEXT = 200
STEPS = 50
ROUNDS = 6
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "[0-9]{5}"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
_MANY = [f"property_{number}" for number in range(1000)]
HOSTILE = {
    "(a{1,1000}){1,1000}": LLMatcher.grammar_from_regex("(a{1,1000}){1,1000}"),
    "(.*a){30}": LLMatcher.grammar_from_regex("(.*a){30}"),
    "(x+x+)+y": LLMatcher.grammar_from_regex("(x+x+)+y"),
    "([a-z]+)*\\d{5000}": LLMatcher.grammar_from_regex("([a-z]+)*\\d{5000}"),
    "[^a]{0,100000}": LLMatcher.grammar_from_regex("[^a]{0,100000}"),
    "(a|aa|aaa)*b in 20 ways": LLMatcher.grammar_from_regex("|".join(f"(a|aa|aaa)*b{number}" for number in range(20))),
    "1,000 optional properties": LLMatcher.grammar_from_json_schema({"type": "object", "properties": {name: {} for name in _MANY}}),
    "an enum of 2,000 texts": LLMatcher.grammar_from_json_schema({"enum": ["x" * 20 + str(number) for number in range(2000)]}),
    "an ambiguous sentence": 'start: e\ne: e e | "a" | e "+" e | "(" e ")"',
    "nested anyOf": LLMatcher.grammar_from_json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}} for _ in range(50)]}}}
    ),
}


def measure_rows(driver: Driver, num_rows: int) -> tuple[float, float]:
    """Median seconds of a step without and with a schema."""
    times: dict[str, list[float]] = {"": [], LLMatcher.grammar_from_json_schema(SCHEMA): []}
    for _ in range(ROUNDS):
        for grammar, seconds in times.items():
            sampling = SamplingParams(temperature=1.0, seed=5, grammar=grammar)
            rows = range(num_rows)
            driver.execute([driver.new(row, CONTEXT, CONTEXT - 1, sampling) for row in rows], rows, [1] * num_rows)
            seconds += [driver.decode(num_rows) for _ in range(STEPS)]
            driver.free()
    without, with_schema = map(statistics.median, times.values())
    return without, with_schema


def measure_grammar(tokenizer: LLTokenizer, grammar: str) -> tuple[float, float, str]:
    """Seconds to compile, and of the slowest of 50 masks along a random output; and why it was refused."""
    began = time.perf_counter()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    compiling, slowest = time.perf_counter() - began, 0.0
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    random = np.random.default_rng(0)
    for _ in range(50):
        if matcher.is_stopped():
            break
        began = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        slowest = max(slowest, time.perf_counter() - began)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        matcher.consume_token(int(random.choice(allowed)))
    return compiling, slowest, matcher.get_error().split("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file or a safetensors directory")
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    options = parser.parse_args()
    console = Console(width=150)
    config = WorkerConfig(
        model=ModelConfig(model=options.model, device="cpu"),
        cache=CacheConfig(block_size=16),
        parallel=ParallelConfig(num_threads=1, distributed_executor_backend="uni"),
        max_num_seqs=max(options.rows),
    )
    driver = Driver(config, open_checkpoint(options.model), torch.device("cpu"), 2 * CONTEXT)
    driver.fill_kv()
    table = Table(
        "decodes", "ms", "ms with a schema", "cost", title=f"medians of {ROUNDS * STEPS} steps in turns, {driver.runner.numerics}"
    )
    for num_rows in options.rows:
        without, with_schema = measure_rows(driver, num_rows)
        cost = f"{with_schema / without - 1:+.1%}"
        table.add_row(str(num_rows), f"{without * 1e3:.2f}", f"{with_schema * 1e3:.2f}", cost)
    console.print(table)
    files = load_tokenizer_files(options.model)
    tokenizer = LLTokenizer(files.tokenizer_json, eos_token=files.eos_token_ids)
    table = Table("hostile grammar", "ms to compile", "slowest mask, ms", "refused")
    for name, grammar in HOSTILE.items():
        compiling, slowest, why = measure_grammar(tokenizer, grammar)
        table.add_row(escape(name), f"{compiling * 1e3:.1f}", f"{slowest * 1e3:.1f}", why)
    console.print(table)


if __name__ == "__main__":
    main()
