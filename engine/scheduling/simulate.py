"""The real scheduler driven by a described load, without a model: what each step admits, computes, preempts and lets wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.config import SchedulerConfig
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from gpu.plan import ModelRunnerOutput, SamplingParams, SchedulerOutput


@dataclass(frozen=True)
class Load:
    """Decodes that run already, and prompts that come all at once. No two requests share a token, so that no prefix is cached."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    block_size: int = 16
    num_free_blocks: int | None = None  # once the decodes hold theirs; None: as many as everything needs
    num_decodes: int = 0
    decode_context: int = 1  # tokens of a running decode whose KV is computed
    decode_tokens: int = 1024  # that a running decode still makes
    prompts: tuple[int, ...] = ()  # tokens each
    output_tokens: int = 4  # that each prompt is answered with
    priorities: tuple[int, ...] = ()  # of the prompts; missing ones are 0
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    shrink_chunks: bool = False
    watermark: float = 0.0
    max_steps: int = 64


@dataclass
class SimulatedStep:
    step: int  # from 1
    num_decodes: int = 0  # requests that compute one token beyond their prompt
    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)  # prompts computed: (tokens, new blocks)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)  # why
    waiting: list[str] = field(default_factory=list)
    blocked: str = ""  # the first waiting request, when blocks are what it lacks
    blocked_tokens: int = 0
    blocked_blocks: int = 0
    blocked_short: int = 0
    num_tokens: int = 0
    num_free_blocks: int = 0  # after planning

    @property
    def num_new_blocks(self) -> int:
        return sum(blocks for _, blocks in self.chunks.values())


def simulate(load: Load) -> Iterator[SimulatedStep]:
    """Steps until the prompts are answered, nothing moves any more, or `max_steps`. Raises ValueError for an impossible load."""
    scheduler, worker = _make_scheduler(load), _CountingWorker(load.max_num_seqs)
    _start_decodes(scheduler, worker, load)
    for index, length in enumerate(load.prompts):
        priority = load.priorities[index] if index < len(load.priorities) else 0
        _add(scheduler, f"prompt {index + 1}", length, load.output_tokens, load.num_decodes + index, priority)
    prompts_left = len(load.prompts)
    for step in range(1, load.max_steps + 1):
        before = {request.key: (request.num_preemptions, len(request.block_ids)) for request in scheduler.requests.values()}
        plan = scheduler.schedule(float(step))
        line = _describe(scheduler, plan, before, step)
        outputs = scheduler.update_from_output(plan, worker.execute(plan), float(step))
        line.finished = {request.request_id: request.error or str(request.finish_reason) for request in outputs.finished}
        yield line
        prompts_left -= sum(name.startswith("prompt") for name in line.finished)
        if not scheduler.has_work or plan.total_num_scheduled_tokens == 0 or (load.prompts and prompts_left == 0):
            return


def render(steps: Iterable[SimulatedStep]) -> Iterator[str]:
    """Text, a paragraph a step; steps that are alike but for their number become one."""
    first, last, text = 0, 0, ""
    for line in steps:
        following = "\n".join(_lines(line))
        if following != text:
            if text:
                yield _numbered(first, last, text)
            first, text = line.step, following
        last = line.step
    if text:
        yield _numbered(first, last, text)


def _numbered(first: int, last: int, text: str) -> str:
    return f"step {first}: {text}" if first == last else f"steps {first} to {last}, each: {text}"


def _lines(line: SimulatedStep) -> Iterator[str]:
    parts = [f"{line.num_decodes} decodes"]
    parts += [f"{name}: {tokens} tokens, {blocks} new blocks" for name, (tokens, blocks) in line.chunks.items()]
    yield f"{line.num_tokens} tokens = {' + '.join(parts)}; {line.num_free_blocks} blocks free"
    if line.admitted:
        yield f"  admitted: {', '.join(line.admitted)}"
    if line.preempted:
        yield f"  preempted: {', '.join(line.preempted)}"
    if line.blocked:
        need = f"chunk of {line.blocked_tokens} tokens, {line.blocked_blocks} blocks needed, {line.blocked_short} short"
        yield f"  not admitted: {line.blocked}: {need}"
    if line.waiting:
        yield f"  waiting: {', '.join(line.waiting)}"
    for name, reason in line.finished.items():
        yield f"  finished: {name} ({reason})"


def _make_scheduler(load: Load) -> Scheduler:
    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // load.block_size)

    longest = max([load.decode_context + load.decode_tokens, *(prompt + load.output_tokens for prompt in load.prompts)]) + 1
    held = load.num_decodes * blocks(load.decode_context)
    free = load.num_free_blocks
    if free is None:
        free = load.num_decodes * blocks(longest) - held + sum(blocks(prompt + load.output_tokens) for prompt in load.prompts)
    if load.num_decodes > load.max_num_seqs:
        raise ValueError(f"{load.num_decodes} running decodes are more than max_num_seqs {load.max_num_seqs}")
    config = SchedulerConfig(
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_num_seqs=load.max_num_seqs,
        long_prefill_token_threshold=load.long_prefill_token_threshold,
        scheduling_policy=load.scheduling_policy,
        shrink_chunks=load.shrink_chunks,
        watermark=load.watermark,
    )
    return Scheduler(config, load.block_size, max(2, 1 + held + free), longest)


def _start_decodes(scheduler: Scheduler, worker: _CountingWorker, load: Load) -> None:
    """Bring the decodes, in one step with a budget of its own, to `decode_context` tokens computed and the next one known."""
    for index in range(load.num_decodes):
        _add(scheduler, f"decode {index + 1}", load.decode_context, load.decode_tokens + 1, index, 0)
    scheduler.max_num_batched_tokens = max(1, load.num_decodes * load.decode_context)
    plan = scheduler.schedule(0.0)
    scheduler.update_from_output(plan, worker.execute(plan), 0.0)
    scheduler.max_num_batched_tokens = load.max_num_batched_tokens


def _add(scheduler: Scheduler, name: str, num_tokens: int, max_tokens: int, index: int, priority: int) -> None:
    tokens = np.full(num_tokens, index, dtype=np.int32)
    scheduler.add_request(Request(name, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), priority=priority))


def _describe(
    scheduler: Scheduler, plan: SchedulerOutput, before: dict[tuple[str, int], tuple[int, int]], step: int
) -> SimulatedStep:
    """The step just planned; `before` holds preemptions and blocks of every live request, as they were."""
    line = SimulatedStep(step, num_tokens=plan.total_num_scheduled_tokens, num_free_blocks=scheduler.kv.pool.num_free)
    new_rows = {new.row for new in plan.new_requests}
    for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
        request = scheduler.rows.request(row)
        if row not in new_rows and count == 1 and scheduler.rows.num_computed[row] > request.num_prompt_tokens:
            line.num_decodes += 1
            continue
        held = 0 if row in new_rows else before[request.key][1]
        line.chunks[request.request_id] = (count, len(request.block_ids) - held)
        if row in new_rows:
            line.admitted.append(request.request_id)
    for request in scheduler.waiting:
        line.waiting.append(request.request_id)
        if request.num_preemptions > before[request.key][0]:
            line.preempted.append(request.request_id)
    if (blocked := scheduler.blocked) is not None:
        line.blocked = blocked.request.request_id
        line.blocked_tokens = blocked.num_tokens
        line.blocked_blocks = blocked.num_blocks_needed
        line.blocked_short = blocked.num_blocks_short
    return line


class _CountingWorker:
    """Keeps a worker's counts and samples token 0 wherever a row has no token left to compute."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for new in plan.new_requests:
            self._num_tokens[new.row] = len(new.token_ids)
            self._num_computed[new.row] = new.num_computed_tokens
        self._num_computed[plan.rows] += plan.num_scheduled_tokens
        rows = plan.rows[self._num_computed[plan.rows] == self._num_tokens[plan.rows]]
        self._num_tokens[rows] += 1
        return ModelRunnerOutput(plan.step, rows, np.zeros(len(rows), dtype=np.int32), [], [], {}, 0.0)
