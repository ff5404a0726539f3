"""One HTTP request while its tokens are made: streams push tokens in, the generation pushes `ChoiceOutput`s into its sink.

It owns the end. Each choice ends once: by its engine's word, by a stop string that was found here, or because the generation is
aborted or fails. The sink is told once that nothing follows. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from api.errors import ApiError, BadRequest, Conflict, DeadlineExceeded, GenerationError, as_api_error, sanitize_message
from api.preparation.task import Task
from api.response.logprobs import PromptLogprobsCollector
from api.response.message_parts import marks, reasoning_counter
from api.response.output_processor import Choice, ChoiceOutput
from api.response.usage import Usage
from engine.client.request_stream import RequestStream
from engine.protocol import INVALID_REQUEST, LATE, TIMED_OUT, FinishedOutput, FinishReason, OutputLogprobs, OutputPromptLogprobs

logger = logging.getLogger("headrace.api")


class Sink(Protocol):
    """Where a generation's outputs go: an event stream, or a whole answer in the making. Nothing here waits."""

    def put(self, output: ChoiceOutput) -> None: ...

    def end(self, error: ApiError | None = None) -> None:
        """No output follows, because all choices have ended, or because of `error`. Called once."""
        ...


class _NoSink:
    def put(self, output: ChoiceOutput) -> None:
        pass

    def end(self, error: ApiError | None = None) -> None:
        pass


NO_SINK = _NoSink()


class GenerationObserver(Protocol):
    """Counts and logs. Times are epoch seconds."""

    def opened(self, generation: Generation) -> None: ...

    def first_output(self, generation: Generation, now: float) -> Callable[[float], None]:
        """A choice's first token arrived. The function returned is called with the seconds between two tokens of a choice."""
        ...

    def choice_ended(self, generation: Generation, reason: FinishReason) -> None: ...

    def closed(self, generation: Generation) -> None: ...


class Generation:
    """`arrival`: epoch seconds at which the HTTP request came. Its `sink` is set before its requests are enqueued."""

    sink: Sink

    def __init__(
        self,
        task: Task,
        external_id: str,
        internal_ids: list[str],
        arrival: float,
        tenant: str,
        observer: GenerationObserver,
        grace: float = 0.0,
    ) -> None:
        self.task = task
        self.tenant = tenant
        self.external_id = external_id
        self.internal_ids = internal_ids
        self.arrival = arrival
        self.grace = grace  # seconds that its requests go on when its client has gone
        self.first_output = 0.0  # epoch seconds, once there was one
        self.ended = False  # the sink has been told
        self.closed = False
        self.runs = [PromptRun(self, place) for place in range(len(task.prompts))]
        self.choices = [choice for run in self.runs for choice in run.choices]
        self._num_running = len(self.choices)  # choices whose engine has not sent the end
        self._streams: Sequence[RequestStream] = ()
        self._timer: asyncio.TimerHandle | None = None  # of the deadline
        self._observer = observer
        self._observe_gap: Callable[[float], None]

    @property
    def created(self) -> int:
        return int(self.arrival)

    @property
    def usage(self) -> Usage:
        """The usage of all prompts and choices so far."""
        return Usage(
            sum(len(run.prompt.token_ids) for run in self.runs),
            sum(choice.num_tokens for choice in self.choices),
            sum(run.final.num_cached_tokens for run in self.runs if run.final is not None),
            self._num_reasoning_tokens(),
        )

    def _num_reasoning_tokens(self) -> int | None:
        """None: nothing is told apart."""
        counts = [choice.reasoning.num_tokens for choice in self.choices if choice.reasoning is not None]
        return sum(counts) if counts else None

    @property
    def num_before(self) -> int | None:
        """Requests that wait before the first of this one, as of some seconds ago; None: it does not wait."""
        known = [stream.num_before for stream in self._streams if stream.num_before is not None]
        return None if self.first_output or len(known) < len(self._streams) else min(known, default=None)

    def begin(self, streams: Sequence[RequestStream]) -> None:
        """The requests are enqueued: `streams`, one a prompt, are this generation's to abort."""
        self._streams = streams
        self._observer.opened(self)
        if self.ended:  # it failed on what came meanwhile
            self._abort_streams()

    def abort(self) -> None:
        """End everything now: each open choice with what it has. Idempotent."""
        if self.ended:
            return
        self._abort_streams()
        try:
            for run in self.runs:
                run.abort()
        except Exception as error:
            self.fail(error)
        else:
            self._end()

    def limit_time(self, seconds: float) -> None:
        """End everything with an error after so many seconds from now."""
        if not self.ended:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        if not self.ended:
            for stream in self._streams:
                stream.abort(FinishReason.ERROR)
            self.fail(DeadlineExceeded(LATE))

    def fail(self, error: Exception) -> None:
        """End everything now with an error. Idempotent."""
        if self.ended:
            return
        if not isinstance(error, ApiError):
            logger.error("a generation failed", exc_info=error, extra={"request_id": self.external_id})
        self._abort_streams()
        self._end(as_api_error(error))

    def close(self) -> None:
        """However the HTTP request ended: nothing of it goes on in the engine. Idempotent."""
        if self.closed:
            return
        self.closed = True
        try:
            self.abort()
        finally:  # a sink that fails must not leave a request open to metrics and to the server's end
            for choice in self.choices:
                if choice.finish_reason is None:
                    choice.finish_reason = FinishReason.ABORT
                    self.note_end(FinishReason.ABORT)
            self._observer.closed(self)

    def release(self) -> None:
        """The answer is written: the parts of this, which know it, are let go. Their cycles would cost the garbage collector a walk
        over hundreds of requests at once. Idempotent."""
        assert self.closed
        self.runs, self.choices, self._streams = [], [], ()
        self.sink = NO_SINK

    # What its prompts tell

    def note_token(self, choice: Choice) -> None:
        now = time.time()
        if choice.last_token:
            self._observe_gap(now - choice.last_token)
        else:
            self.first_output = self.first_output or now
            self._observe_gap = self._observer.first_output(self, now)
        choice.last_token = now

    def note_end(self, reason: FinishReason) -> None:
        self._observer.choice_ended(self, reason)

    def engine_ended(self) -> None:
        """Nothing more can come of one of the choices."""
        self._num_running -= 1
        if not self._num_running:
            self._end()

    def _abort_streams(self) -> None:
        for stream in self._streams:
            stream.abort()

    def _end(self, error: ApiError | None = None) -> None:
        if not self.ended:
            self.ended = True
            if self._timer is not None:
                self._timer.cancel()
            self.sink.end(error)


class PromptRun:
    """One prompt of a generation with its `n` choices: the receiver of its stream. Its failures are the generation's."""

    def __init__(self, generation: Generation, place: int) -> None:
        task = generation.task
        self.prompt = task.prompts[place]
        self.logprobs = PromptLogprobsCollector(self.prompt.token_ids)
        self.final: FinishedOutput | None = None  # the engine's word on the choice that ended last
        self.ended_at = 0.0  # epoch seconds at which its last choice ended, once one has
        self._generation = generation
        self._task = task
        self._score_only = task.score_only
        self._sampling = task.sampling[place]
        self._answer = answer = task.answer
        echo_len = len(self.echo_text()) if answer.echo else 0
        self.choices = [self._make_choice(place * task.n + choice, echo_len) for choice in range(task.n)]
        lacks_logprobs = self._sampling.prompt_logprobs is not None and not self.logprobs.complete
        # An echo begins with the logprobs of its prompt: outputs that come before them are held. None: nothing is held.
        self._held: list[ChoiceOutput] | None = [] if task.stream and answer.echo and lacks_logprobs else None

    def _make_choice(self, index: int, echo_len: int) -> Choice:
        answer, sampling = self._answer, self._sampling
        return Choice(
            index,
            self._task.model.tokenizer.detokenizer(
                self.prompt.token_ids,
                answer.skip_special_tokens,
                keep_prompt_tail=answer.echo,
                kept=marks(answer),
            ),
            answer.stop,
            answer.include_stop,
            sampling.min_tokens,
            frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(sampling.eos_token_ids)),
            echo_len,
            reasoning_counter(answer),
        )

    def echo_text(self) -> str:
        """The prompt as it is echoed."""
        prompt = self.prompt
        return prompt.text if prompt.text is not None else self._task.model.tokenizer.echo_text(prompt.token_ids)

    def abort(self) -> None:
        """Each open choice ends with what it has."""
        self._release()
        for choice in self.choices:
            if choice.finish_reason is None:
                self._say(choice.abort())

    # What its stream tells

    def take_token(self, choice: int, token_id: int, logprobs: OutputLogprobs | None) -> str | None:
        if self._score_only or self._generation.ended:
            return None
        taker = self.choices[choice]
        try:
            output = taker.take(token_id, logprobs)
            self._generation.note_token(taker)
            if output.finish_reason is None and self._held is None:
                self._generation.sink.put(output)
                return None
            self._say(output)
        except Exception as error:
            self._generation.fail(error)
            return None
        return output.stop_reason if isinstance(output.stop_reason, str) else None

    def take_prompt_logprobs(self, part: OutputPromptLogprobs) -> None:
        try:
            self.logprobs.add(part)
            if self.logprobs.complete:
                self._release()
        except Exception as error:
            self._generation.fail(error)

    def take_end(self, choice: int, end: FinishedOutput) -> None:
        self.final = end
        try:
            output = self.choices[choice].finish(end)
            if output.finish_reason == FinishReason.ERROR or (output.finish_reason == FinishReason.ABORT and end.error):
                self._note_end(output.finish_reason)
                raise _failure(end)
            if output.finish_reason is not None and not self._generation.ended:
                self._say(output)
        except Exception as error:
            self._generation.fail(error)
        self._generation.engine_ended()

    def _say(self, output: ChoiceOutput) -> None:
        if output.finish_reason is not None:
            self._note_end(output.finish_reason)
        if self._held is not None:
            self._held.append(output)
        else:
            self._generation.sink.put(output)

    def _note_end(self, reason: FinishReason) -> None:
        self.ended_at = time.time()
        self._generation.note_end(reason)

    def _release(self) -> None:
        """Nothing is held back from now on."""
        held, self._held = self._held or [], None
        for output in held:
            self._generation.sink.put(output)


def _failure(end: FinishedOutput) -> ApiError:
    """The engine's word as the client hears it: a fault of the request's own fields, or one of the server's; or the word of the
    process that ended the request in its stead."""
    error = end.error or "The engine could not go on with this request."
    if end.reason is FinishReason.ABORT:
        return Conflict(sanitize_message(error))
    if error.startswith(TIMED_OUT):
        return DeadlineExceeded(error)
    return (BadRequest if error.startswith(INVALID_REQUEST) else GenerationError)(sanitize_message(error))
