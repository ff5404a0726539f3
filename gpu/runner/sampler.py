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
from gpu.runner.token_rules import TokenRules
from kernels.gumbel import gumbel_argmax
from kernels.logprobs import gather_logprobs
from kernels.min_p import apply_min_p
from kernels.penalties import apply_penalties
from kernels.top_k_top_p import apply_top_k_top_p

if TYPE_CHECKING:
    from gpu.runner.input_batch import Batch

NO_TOKEN = "the request's sampling parameters leave no token to choose"
NOT_FINITE = "the model's logits are not finite"
REPETITION_RANGE = (1e-30, 1e30)  # well inside float32's 1e+-38, so that logits stay finite


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
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)  # -1: none wanted
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.rules = TokenRules(max_num_seqs, vocab_size)

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
        self.rules.clear(row)
        return self.rules.set(row, sampling)

    def clear(self, row: int) -> None:
        self.rules.clear(row)

    def _count(self, wanted: int | None) -> int:
        if wanted is None:
            return -1
        return self.vocab_size if wanted < 0 else min(wanted, self.vocab_size)


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
        table.rules.apply(logits, rows, batch)
        _apply_penalties(logits, rows, batch)
        greedy = table.greedy[rows]
        if greedy.all():
            drawn = _argmax(logits)
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
    ids = token_ids.unsqueeze(1)
    if k:
        ids = torch.cat((ids, logits.topk(k, dim=-1).indices), dim=1)
    logprobs, ranks = gather_logprobs(logits, ids)
    return ids.to("cpu", torch.int32).numpy(), logprobs.cpu().numpy(), ranks.cpu().numpy()


def _fail_not_finite(logits: torch.Tensor) -> dict[int, str]:
    """Rows with NaN or infinity, whose logits are set to zero so that what follows need not mind them."""
    places = (~torch.isfinite(logits.sum(dim=-1))).nonzero()[:, 0].tolist()
    for place in places:
        logits[place] = 0.0
    return {place: NOT_FINITE for place in places}


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id among the largest of each row, [num_rows] int64; on the CPU by numpy, which takes a 13th of torch's time."""
    return logits.argmax(dim=-1) if logits.device.type != "cpu" else torch.from_numpy(logits.numpy().argmax(axis=-1))


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
    """logits[i] belongs to rows[places[i]]. Rows that want equally many go together, so that none pays for another."""
    told: list[SampledLogprobs] = []
    wanted = table.num_logprobs[rows[places]]
    for k in np.unique(wanted).tolist():
        group = np.flatnonzero(wanted == k)
        its_logits = logits if len(group) == len(places) else logits[torch.from_numpy(group)]
        chosen = torch.from_numpy(token_ids[places[group]]).long().to(logits.device)
        ids, values, ranks = top_logprobs(its_logits, chosen, k)
        told += [
            SampledLogprobs(int(rows[place]), ids[i].copy(), values[i].copy(), int(ranks[i]))
            for i, place in enumerate(places[group].tolist())
            if place not in failed
        ]
    return told
