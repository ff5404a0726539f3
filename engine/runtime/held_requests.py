"""The requests that an engine took: their source, their choices and ends, and the output for their records."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import InitVar, dataclass, field

import numpy as np

from engine.protocol import (
    Abort,
    Attach,
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    OutputLogprobs,
    OutputPromptLogprobs,
    StoredChoice,
    StoredOutput,
    encode_column,
)
from engine.runtime.folding import FoldedOutput
from engine.scheduling.request import Request
from gpu.plan import PromptLogprobs, SampledLogprobs


@dataclass
class HeldRequest:
    """A request that this engine took, with its `n` choices."""

    source: EngineCoreRequest
    choices: list[Request]
    prompt_logprobs: list[OutputPromptLogprobs] = field(default_factory=list)
    logprobs: list[list[OutputLogprobs]] = field(init=False)  # by choice, in order of output; empty when not asked for
    open_choices: set[int] = field(init=False)  # choices that have not ended
    promises: list[Abort] = field(default_factory=list)  # aborts to confirm when the choices that they name have ended
    is_foreign: bool = False  # another engine has it by now: its choices close here, and nothing of them is told
    folded: InitVar[FoldedOutput | None] = None  # what other engines made of it, which the choices have already

    def __post_init__(self, folded: FoldedOutput | None) -> None:
        self.logprobs = [[] for _ in self.choices]
        if folded is not None:
            self.logprobs = [list(choice.logprobs) for choice in folded.choices]
            self.prompt_logprobs = list(folded.prompt_logprobs)
        self.open_choices = {request.choice for request in self.choices}

    def is_open(self, choice: int) -> bool:
        """The choice, or any (-1), has not ended."""
        return choice in self.open_choices if choice >= 0 else bool(self.open_choices)

    def take_due_promises(self) -> list[Abort]:
        if not self.promises:
            return []
        due = [command for command in self.promises if not self.is_open(command.choice)]
        self.promises = [command for command in self.promises if self.is_open(command.choice)]
        return due

    def finished_output(self, request: Request) -> FinishedOutput:
        return FinishedOutput(
            handle=request.handle,
            choice=request.choice,
            num_tokens=request.num_output_tokens,
            reason=reason_of(request),
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            times=request.times,
            error=request.error,
        )

    def stored_output(self) -> StoredOutput:
        """The whole output, once every choice has ended."""
        choices = [
            StoredChoice(
                encode_column(request.output_token_ids),
                reason_of(request),
                request.stop_reason,
                request.error,
                self.logprobs[request.choice][: request.num_output_tokens],
            )
            for request in self.choices
        ]
        first = self.choices[0]
        return StoredOutput(choices, first.num_cached_tokens, first.times, self.prompt_logprobs)


class HeldRequests:
    """All requests that this engine took and has not ended, by id; and commands that overtook theirs.

    A command can be read before the request it names, because the two travel on different keys: it is remembered and obeyed then.
    """

    MOST_EARLY = 4096

    def __init__(self) -> None:
        self._held: dict[str, HeldRequest] = {}
        self._early_aborts: OrderedDict[str, dict[int, Abort]] = OrderedDict()  # by request id and choice
        self._early_attaches: OrderedDict[str, Attach] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, request_id: str) -> HeldRequest | None:
        """None also for one that is foreign: a command that names it is meant for the request when it comes again."""
        held = self._held.get(request_id)
        return None if held is None or held.is_foreign else held

    def is_closing(self, request_id: str) -> bool:
        """It is foreign, and some of its choices have not closed: the core cannot have it again yet."""
        held = self._held.get(request_id)
        return held is not None and held.is_foreign

    def of(self, request: Request) -> HeldRequest:
        """The held request of a choice that has not been closed."""
        return self._held[request.request_id]

    def all(self) -> list[HeldRequest]:
        """But those that are foreign."""
        return [held for held in self._held.values() if not held.is_foreign]

    def add(self, held: HeldRequest) -> tuple[Abort, ...]:
        """Hold a request; returns the aborts that came before it."""
        self._held[held.source.request_id] = held
        return tuple(self._early_aborts.pop(held.source.request_id, {}).values())

    def remember_abort(self, command: Abort) -> None:
        self._early_aborts.setdefault(command.request_id, {})[command.choice] = command
        if len(self._early_aborts) > self.MOST_EARLY:
            self._early_aborts.popitem(last=False)

    def remember_attach(self, command: Attach) -> None:
        self._early_attaches[command.request_id] = command
        if len(self._early_attaches) > self.MOST_EARLY:
            self._early_attaches.popitem(last=False)

    def take_early_attach(self, request_id: str) -> Attach | None:
        """The last one that came before its request."""
        return self._early_attaches.pop(request_id, None)

    def close_choice(self, request: Request) -> HeldRequest | None:
        """Note the end of a choice; returns the held request when it was the last one, which is then no longer held."""
        held = self._held[request.request_id]
        held.open_choices.remove(request.choice)
        return None if held.open_choices else self._held.pop(request.request_id)


def reason_of(request: Request) -> FinishReason:
    """Why a request has ended."""
    assert request.finish_reason is not None, f"{request} has not ended"
    return request.finish_reason


def output_logprobs(request: Request, offset: int, entry: SampledLogprobs) -> OutputLogprobs:
    return OutputLogprobs(
        request.handle,
        request.choice,
        offset,
        encode_column(entry.token_ids),
        encode_column(entry.logprobs, np.float32),
        entry.rank,
    )


def output_prompt_logprobs(request: Request, entry: PromptLogprobs) -> OutputPromptLogprobs:
    return OutputPromptLogprobs(
        request.handle,
        entry.position,
        encode_column(entry.token_ids),
        encode_column(entry.logprobs, np.float32),
        encode_column(entry.ranks),
    )
