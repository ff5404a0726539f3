"""From logits to tokens: what each row's SamplingParams ask, in vLLM's order.

Grammar, allowed ids, bad words, min_tokens, logit bias, thinking budget, penalties, temperature, min-p, top-k, top-p, then argmax
with Gumbel noise (or without, where the row is greedy). A feature that no row of the batch asks for costs one look at a flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gpu.plan import INVALID_REQUEST, Int32Array, SampledLogprobs
from gpu.runner.grammars import TokenMasks
from gpu.runner.sampling_table import SamplingTable
from gpu.runner.token_rules import Histories
from kernels.gumbel import gumbel_argmax
from kernels.logprobs import gather_logprobs
from kernels.min_p import apply_min_p
from kernels.penalties import apply_penalties
from kernels.token_mask import apply_token_mask
from kernels.top_k_top_p import apply_top_k_top_p

NO_TOKEN = f"{INVALID_REQUEST}its sampling parameters leave no token to choose"
NOT_FINITE = "the model's logits are not finite"


@dataclass
class Sampled:
    token_ids: Int32Array  # [num_rows]; meaningless where failed
    logprobs: list[SampledLogprobs]
    failed: dict[int, str] = field(default_factory=dict)  # place -> why


class Sampler:
    def __init__(self, logprobs_mode: str) -> None:
        self.raw_logprobs = logprobs_mode == "raw_logprobs"

    def __call__(
        self, logits: torch.Tensor, rows: Int32Array, table: SamplingTable, histories: Histories, masks: TokenMasks | None = None
    ) -> Sampled:
        """logits [num_rows, vocab] float32, changed in place; logits[i] are for the next token of row rows[i] of the tables."""
        failed = _fail_not_finite(logits)
        wanting = np.flatnonzero(table.num_logprobs[rows] >= 0)
        logprob_logits = logits[torch.from_numpy(wanting)] if len(wanting) and self.raw_logprobs else None
        if masks is not None:
            apply_token_mask(logits, *(torch.from_numpy(x).to(logits.device) for x in (masks.places, masks.masks)))
            failed |= masks.failed
        table.rules.apply(logits, rows, histories)
        table.thinking.apply(logits, rows, histories)
        _apply_penalties(logits, rows, table, histories)
        greedy = table.greedy[rows]
        if greedy.all():
            drawn = _argmax(logits)
        else:
            _apply_filters(logits, rows, table)
            arrays = (greedy, table.seeds[rows], histories.num_tokens[rows].astype(np.int64))
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


def _apply_penalties(logits: torch.Tensor, rows: Int32Array, table: SamplingTable, histories: Histories) -> None:
    places = np.flatnonzero(table.penalized[rows])
    if not len(places):
        return
    penalized = rows[places]
    device = logits.device
    tokens, index = histories.token_ids, penalized
    if device.type != "cpu":
        tokens = tokens[penalized, : int(histories.num_tokens[penalized].max())]
        index = np.arange(len(penalized), dtype=np.int32)
    columns = (histories.num_prompt_tokens, histories.num_tokens, table.presence, table.frequency, table.repetition)
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
