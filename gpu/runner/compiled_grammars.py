"""Grammars compiled once for all requests that have them. Torch-free.

The parser is llguidance's (https://github.com/guidance-ai/llguidance). Grammars are compiled on a thread of their own, before their
requests come to a step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gpu.plan import GRAMMAR_LIMITS, INVALID_REQUEST

MOST_COMPILED = 64  # grammars kept for further requests
MOST_REASON = 400  # characters


class CompiledGrammars:
    """Matchers at the beginning of their grammars, the last ones used. Safe on any thread."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        """`make_tokenizer` is called once, when the first grammar comes."""
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, "grammars")

    def __len__(self) -> int:
        return len(self._matchers)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of the caller's own. One that cannot be compiled is in error."""
        with self._lock:
            if grammar not in self._matchers:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
                self._matchers[grammar] = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
                if len(self._matchers) > MOST_COMPILED:
                    self._matchers.popitem(last=False)
            self._matchers.move_to_end(grammar)
            return self._matchers[grammar].deep_copy()

    def compile(self, grammar: str) -> Future[str]:
        """So that a step finds it compiled. The result is why it cannot be compiled, or ""."""
        return self._compiling.submit(self._why_not, grammar)

    def _why_not(self, grammar: str) -> str:
        try:
            return reason(self.matcher(grammar).get_error())
        except Exception as error:  # no tokenizer, say
            return reason(f"{type(error).__name__}: {error}")


def grammar_tokenizer(model: str, vocab_size: int) -> LLTokenizer:
    """`model`: its path. Raises CheckpointError."""
    from gpu.checkpoint.tokenizer_files import load_tokenizer_files  # 50 ms, which a start need not wait for

    files = load_tokenizer_files(model)
    return LLTokenizer(files.tokenizer_json, n_vocab=vocab_size, eos_token=files.eos_token_ids)


def reason(error: str) -> str:
    """The parser's error as the reason why a request fails; "" where there is none."""
    return f"{INVALID_REQUEST}its output cannot be held to its grammar: {' '.join(error.split())[:MOST_REASON]}" if error else ""
