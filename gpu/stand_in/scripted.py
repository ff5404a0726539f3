"""A model runner that answers with given texts, token by token. Torch-free.

Chosen by `load_format="scripted"`, for demos, and for tests of parsers and clients with outputs that a small model would never
produce. An output depends on the prompt alone: on neither seed nor sampling parameters, save that `min_tokens` holds ends back.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.config import Capacity, WorkerConfig
from gpu.plan import INVALID_REQUEST, Int32Array, NewRequest, SamplingParams
from gpu.runner.compiled_grammars import CompiledGrammars, grammar_tokenizer
from gpu.stand_in.conversation import Conversation
from gpu.stand_in.runner import StandInRunner, StandInSettings
from gpu.stand_in.script import Script

MAX_MODEL_LEN = 131072  # the prompts of coding agents are longer than what a small model with the same tokenizer was made for
_SHOWN = 60  # characters of a text in an error


@dataclass(frozen=True)
class ScriptedOutput:
    """The answer and an end-of-sequence token, again and again."""

    token_ids: list[int]  # of the answer
    end: int | None  # None: the request has no end token
    min_tokens: int = 0  # before the first end, which comes behind a whole answer

    def token(self, position: int) -> int:
        length = len(self.token_ids)
        first_end = max(1, -(-self.min_tokens // max(1, length))) * length
        if self.end is None or position < first_end:
            return self.token_ids[position % length]
        turn = (position - first_end) % (length + 1)
        return self.token_ids[turn - 1] if turn else self.end


class ScriptedRunner(StandInRunner):
    def __init__(self, config: WorkerConfig, rank: int = 0, settings: StandInSettings | None = None) -> None:
        """Raises UnsupportedConfiguration for the script, CheckpointError for the model's tokenizer."""
        super().__init__(config, rank, settings)
        model = config.model.model
        self.script = Script.read(config.model.script)
        tokenizer_json = load_tokenizer_files(model).tokenizer_json
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.grammars = CompiledGrammars(partial(grammar_tokenizer, model, self.vocab_size))
        self.outputs: dict[int, ScriptedOutput] = {}  # by row
        self._fingerprint = hashlib.sha256(f"{tokenizer_json}\0{self.script.text}".encode()).hexdigest()[:32]

    def capacity(self) -> Capacity:
        return self._capacity("scripted", MAX_MODEL_LEN, f"scripted-{self._fingerprint}")

    def compile_grammar(self, grammar: str) -> Future[str]:
        return self.grammars.compile(grammar)

    def _take(self, request: NewRequest) -> None:
        super()._take(request)
        try:
            prompt = self.tokenizer.decode(request.token_ids[: request.num_prompt_tokens].tolist(), skip_special_tokens=False)
            self.outputs[request.row] = self._output(prompt, request.sampling)
        except ValueError as error:
            self.failed.setdefault(request.row, f"{INVALID_REQUEST}{error}")

    def _next_tokens(self, rows: Int32Array) -> Int32Array:
        positions = self.num_tokens[rows] - self.num_prompt[rows]
        tokens = [self.outputs[row].token(position) for row, position in zip(rows.tolist(), positions.tolist(), strict=True)]
        return np.array(tokens, np.int32)

    def _output(self, prompt: str, sampling: SamplingParams) -> ScriptedOutput:
        """Raises ValueError with the reason why there is none."""
        conversation = Conversation.of(prompt)
        answer = self.script.answer(conversation)
        if answer is None:
            raise ValueError(f"the script has no rule for an input that ends in {conversation.inputs[-1][-_SHOWN:]!r}")
        token_ids = self.tokenizer.encode(answer, add_special_tokens=False).ids
        held_back = sampling.held_back_token_ids
        token_ids = [token for token in token_ids if token not in held_back]
        end = next(iter(sampling.eos_token_ids), None)
        if not token_ids and (end is None or sampling.min_tokens):
            raise ValueError("the script's answer is empty, and the request may not end with it")
        if sampling.grammar:
            self._check(sampling.grammar, token_ids, answer)
        return ScriptedOutput(token_ids, end, sampling.min_tokens)

    def _check(self, grammar: str, token_ids: list[int], answer: str) -> None:
        """Raises ValueError where the answer does not match the grammar."""
        matcher = self.grammars.matcher(grammar)
        matching = matcher.try_consume_tokens(token_ids)
        if matching < len(token_ids):
            rest = self.tokenizer.decode(token_ids[matching:], skip_special_tokens=False)[:_SHOWN]
            raise ValueError(f"the script's answer does not match the request's grammar from token {matching} on, {rest!r}")
        if not (matcher.is_stopped() or matcher.is_accepting()):
            raise ValueError(f"the script's answer ends before the request's grammar may: {answer[-_SHOWN:]!r}")
