"""From logits to tokens: what each row's SamplingParams ask, in vLLM's order.

Allowed ids, bad words, min_tokens, logit bias, penalties, temperature, min-p, top-k, top-p, then argmax with Gumbel noise (or
without, where the row is greedy). A feature that no row of the batch asks for costs one look at a flag column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu.plan import Int32Array, SampledLogprobs, SamplingParams
from kernels.gumbel import gumbel_argmax
from kernels.logit_bias import add_logit_bias
from kernels.logprobs import gather_logprobs
from kernels.min_p import apply_min_p
from kernels.penalties import apply_penalties
from kernels.top_k_top_p import apply_top_k_top_p

if TYPE_CHECKING:
    from gpu.batch import Batch

NO_TOKEN = "the request's sampling parameters leave no token to choose"
NOT_FINITE = "the model's logits are not finite"
REPETITION_RANGE = (1e-30, 1e30)  # float32 knows smaller and larger ones as 0 and infinity; so far logits stay finite under them


@dataclass
class _TokenRules:
    """What a row says about single token ids; [] where it says nothing."""

    allowed: torch.Tensor | None
    biased: torch.Tensor
    biases: torch.Tensor  # float32, one a biased id
    bad_words: list[list[int]]
    ends: torch.Tensor  # EOS and stop ids, masked until min_tokens
    min_tokens: int


class SamplingTable:
    """Sampling parameters by row, as columns."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.ones(max_num_seqs, np.float32)  # 1 for greedy rows
        self.greedy = np.ones(max_num_seqs, np.bool_)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.penalized = np.zeros(max_num_seqs, np.bool_)
        self.ruled = np.zeros(max_num_seqs, np.bool_)  # has _TokenRules
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)  # -1: none wanted
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.rules: dict[int, _TokenRules] = {}

    def set(self, row: int, sampling: SamplingParams, seed: int) -> str | None:
        """Fills a row. Returns why it cannot be sampled when its parameters name tokens that the model does not have."""
        greedy = sampling.greedy
        self.greedy[row] = greedy
        self.temperature[row] = 1.0 if greedy else sampling.temperature
        self.top_p[row] = 1.0 if greedy else sampling.top_p
        self.top_k[row] = 0 if greedy else max(0, sampling.top_k)
        self.min_p[row] = 0.0 if greedy else sampling.min_p
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.repetition[row] = min(max(sampling.repetition_penalty, REPETITION_RANGE[0]), REPETITION_RANGE[1])
        self.penalized[row] = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        self.seeds[row] = (seed + 2**63) % 2**64 - 2**63  # modulo 2**64 into int64
        self.num_logprobs[row] = self._count(sampling.logprobs)
        self.num_prompt_logprobs[row] = self._count(sampling.prompt_logprobs)
        return self._set_rules(row, sampling)

    def clear(self, row: int) -> None:
        self.rules.pop(row, None)
        self.ruled[row] = False

    def _count(self, wanted: int | None) -> int:
        if wanted is None:
            return -1
        return self.vocab_size if wanted < 0 else min(wanted, self.vocab_size)

    def _set_rules(self, row: int, sampling: SamplingParams) -> str | None:
        self.clear(row)
        ends = [*sampling.eos_token_ids, *sampling.stop_token_ids] if sampling.min_tokens > 0 else []
        if not (sampling.allowed_token_ids or sampling.logit_bias or sampling.bad_words_token_ids or ends):
            return None
        words = [word for word in sampling.bad_words_token_ids if word]
        named = [*sampling.allowed_token_ids, *sampling.logit_bias, *(token for word in words for token in word)]
        if named and not 0 <= min(named) <= max(named) < self.vocab_size:
            return f"sampling parameters name a token id outside the vocabulary of {self.vocab_size}"
        self.ruled[row] = True
        self.rules[row] = _TokenRules(
            allowed=_ids(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
            biased=_ids(list(sampling.logit_bias)),
            biases=torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32),
            bad_words=words,
            ends=_ids([end for end in ends if 0 <= end < self.vocab_size]),
            min_tokens=sampling.min_tokens,
        )
        return None


@dataclass
class Sampled:
    token_ids: Int32Array  # [num_rows]; meaningless where failed
    logprobs: list[SampledLogprobs]
    failed: dict[int, str] = field(default_factory=dict)  # place -> why


class Sampler:
    def __init__(self, logprobs_mode: str) -> None:
        self.raw_logprobs = logprobs_mode == "raw_logprobs"

    def __call__(self, logits: torch.Tensor, rows: Int32Array, batch: Batch) -> Sampled:
        """logits [num_rows, vocab] float32, changed in place; logits[i] are for the next token of batch row rows[i]."""
        table = batch.sampling
        failed = _fail_not_finite(logits)
        wanting = np.flatnonzero(table.num_logprobs[rows] >= 0)
        logprob_logits = logits[torch.from_numpy(wanting)] if len(wanting) and self.raw_logprobs else None
        _apply_rules(logits, rows, batch)
        _apply_penalties(logits, rows, batch)
        greedy = table.greedy[rows]
        if greedy.all():
            drawn = logits.argmax(dim=-1)
        else:
            _apply_filters(logits, rows, table)
            arrays = (greedy, table.seeds[rows], batch.num_tokens[rows].astype(np.int64))
            drawn = gumbel_argmax(logits, *(torch.from_numpy(x).to(logits.device) for x in arrays))
        for place in torch.isneginf(logits.gather(1, drawn.unsqueeze(1)))[:, 0].nonzero()[:, 0].tolist():
            failed.setdefault(place, NO_TOKEN)
        token_ids = drawn.to("cpu", torch.int32).numpy()
        if len(wanting) and logprob_logits is None:
            logprob_logits = logits[torch.from_numpy(wanting)]
        logprobs = [] if logprob_logits is None else _sampled_logprobs(logprob_logits, wanting, rows, token_ids, table, failed)
        return Sampled(token_ids, logprobs, failed)


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits [n, vocab] float32, token_ids [n] int64: ([n, 1 + k] ids, [n, 1 + k] logprobs, [n] ranks of token_ids).

    The token itself, then the k likeliest; its rank is 1 plus the number of likelier tokens.
    """
    ids = torch.cat((token_ids.unsqueeze(1), logits.topk(k, dim=-1).indices), dim=1)
    logprobs, ranks = gather_logprobs(logits, ids)
    return ids.to("cpu", torch.int32).numpy(), logprobs.cpu().numpy(), ranks.cpu().numpy()


def _fail_not_finite(logits: torch.Tensor) -> dict[int, str]:
    """Rows with NaN or infinity, whose logits are set to zero so that what follows need not mind them."""
    places = (~torch.isfinite(logits.sum(dim=-1))).nonzero()[:, 0].tolist()
    for place in places:
        logits[place] = 0.0
    return {place: NOT_FINITE for place in places}


def _apply_rules(logits: torch.Tensor, rows: Int32Array, batch: Batch) -> None:
    biases: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for place in np.flatnonzero(batch.sampling.ruled[rows]).tolist():
        row = int(rows[place])
        rules, row_logits = batch.sampling.rules[row], logits[place]
        if rules.allowed is not None:
            allowed = rules.allowed.to(logits.device)
            kept = row_logits[allowed]
            row_logits.fill_(-torch.inf)
            row_logits[allowed] = kept
        output = batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
        for *prefix, last in rules.bad_words:
            if len(prefix) <= len(output) and output[len(output) - len(prefix) :].tolist() == prefix:
                row_logits[last] = -torch.inf
        if len(output) < rules.min_tokens:
            row_logits[rules.ends.to(logits.device)] = -torch.inf
        if len(rules.biased):
            biases.append((torch.full_like(rules.biased, place), rules.biased, rules.biases))
    if biases:
        add_logit_bias(logits, *(torch.cat(column).to(logits.device) for column in zip(*biases, strict=True)))


def _apply_penalties(logits: torch.Tensor, rows: Int32Array, batch: Batch) -> None:
    table = batch.sampling
    places = np.flatnonzero(table.penalized[rows])
    if not len(places):
        return
    penalized = rows[places]
    device = logits.device
    tokens, index = batch.token_ids, penalized
    if device.type != "cpu":
        tokens = tokens[penalized, : int(batch.num_tokens[penalized].max())]
        index = np.arange(len(penalized), dtype=np.int32)
    columns = (batch.num_prompt_tokens, batch.num_tokens, table.presence, table.frequency, table.repetition)
    arguments = [torch.from_numpy(x).to(device) for x in (tokens, index, *(column[penalized] for column in columns))]
    all_rows = len(places) == len(rows)
    changed = logits if all_rows else logits[torch.from_numpy(places)]
    apply_penalties(changed, *arguments)
    if not all_rows:
        logits[torch.from_numpy(places)] = changed


def _apply_filters(logits: torch.Tensor, rows: Int32Array, table: SamplingTable) -> None:
    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(logits.device)

    if (table.temperature[rows] != 1).any():
        logits.div_(column(table.temperature).unsqueeze(1))
    if table.min_p[rows].any():
        apply_min_p(logits, column(table.min_p))
    if table.top_k[rows].any() or (table.top_p[rows] < 1).any():
        apply_top_k_top_p(logits, column(table.top_k), column(table.top_p))


def _sampled_logprobs(
    logits: torch.Tensor, places: np.ndarray, rows: Int32Array, token_ids: Int32Array, table: SamplingTable, failed: dict[int, str]
) -> list[SampledLogprobs]:
    """logits[i] belongs to rows[places[i]]."""
    chosen = torch.from_numpy(token_ids[places]).long().to(logits.device)
    wanted = table.num_logprobs[rows[places]]
    ids, values, ranks = top_logprobs(logits, chosen, int(wanted.max()))
    return [
        SampledLogprobs(int(rows[place]), ids[i, : 1 + wanted[i]].copy(), values[i, : 1 + wanted[i]].copy(), int(ranks[i]))
        for i, place in enumerate(places.tolist())
        if place not in failed
    ]


def _ids(token_ids: list[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)
