"""One HTTP request while its tokens are made: streams in, `ChoiceOutput`s out, and an end that nothing escapes.

Whoever holds a `Generation` closes it; what has not ended by then is aborted. The same outputs become a stream's chunks or a whole
answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Protocol

from api.errors import BadRequest, GenerationError, sanitize_message
from api.preparation.task import Task
from api.response.logprobs import PromptLogprobsCollector
from api.response.output_processor import ChoiceAssembler, ChoiceOutput
from api.response.usage import Usage
from engine.client.request_stream import ChoiceDelta, RequestStream, RequestUpdate
from engine.protocol import INVALID_REQUEST, FinishedOutput, FinishReason


class GenerationObserver(Protocol):
    """Who counts and logs. Times are epoch seconds."""

    def opened(self, generation: Generation) -> None: ...

    def first_output(self, generation: Generation, now: float) -> Callable[[float], None]:
        """The first tokens arrived. What is returned is called with the seconds between any two outputs that follow."""
        ...

    def choice_ended(self, generation: Generation, index: int, reason: FinishReason) -> None: ...

    def closed(self, generation: Generation) -> None: ...


class Generation:
    """`streams`: one a prompt, owned from now on. `arrival`: epoch seconds at which the HTTP request came."""

    def __init__(
        self,
        task: Task,
        external_id: str,
        internal_ids: list[str],
        streams: Sequence[RequestStream],
        arrival: float,
        tenant: str,
        observer: GenerationObserver,
    ) -> None:
        self.task = task
        self.tenant = tenant
        self.external_id = external_id
        self.internal_ids = internal_ids
        self.created = int(arrival)
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in task.prompts))
        self.prompt_logprobs = [PromptLogprobsCollector(prompt.token_ids) for prompt in task.prompts]
        self.closed = False
        self._streams = streams
        self._observer = observer
        self.arrival = arrival
        self.first_output = 0.0
        self.last_output = 0.0
        self._assemblers = [self._make_assembler(prompt, choice) for prompt in range(len(task.prompts)) for choice in range(task.n)]
        self.finals: dict[int, FinishedOutput] = {}  # by prompt: the engine's word on the last of its choices
        self.reasons: dict[int, FinishReason] = {}  # by choice, as it ended
        self._echoes_logprobs = task.stream and task.echo
        self._observe_gap: Callable[[float], None]
        self._held: dict[int, list[ChoiceOutput]] = {}  # by prompt
        observer.opened(self)

    def _make_assembler(self, prompt: int, choice: int) -> ChoiceAssembler:
        task = self.task
        sampling = task.sampling[prompt]
        token_ids = task.prompts[prompt].token_ids
        return ChoiceAssembler(
            prompt * task.n + choice,
            task.model.tokenizer.detokenizer(token_ids, task.skip_special_tokens, keep_prompt_tail=task.echo),
            task.stop,
            task.include_stop,
            sampling.min_tokens,
            frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(sampling.eos_token_ids)),
            len(self.echo_text(prompt)) if task.echo else 0,
        )

    # The answer's parts

    def echo_text(self, prompt: int) -> str:
        """The prompt as it is echoed."""
        source = self.task.prompts[prompt]
        return source.text if source.text is not None else self.task.model.tokenizer.echo_text(source.token_ids)

    def num_tokens(self, choice: int) -> int:
        """Output tokens of a choice so far, as usage counts them."""
        return 0 if self.task.score_only else self._assemblers[choice].num_tokens

    def usage_of(self, choice: int) -> Usage:
        """Usage of one choice so far, with its own prompt's tokens."""
        return Usage(len(self.task.prompts[choice // self.task.n].token_ids), self.num_tokens(choice))

    async def outputs(self) -> AsyncGenerator[list[ChoiceOutput]]:
        """What the choices have to say, update by update; each ends once. Where the engine gave up it raises BadRequest, if the
        request's own fields are the cause, else GenerationError."""
        if len(self._streams) == 1:  # by far most are of one prompt: they do without the queue, and the generator, of several
            async for update in self._streams[0]:
                if outputs := await self._digest(0, update):
                    yield outputs
        else:
            async with aclosing(_merged(self._streams)) as updates:
                async for prompt, update in updates:
                    if outputs := await self._digest(prompt, update):
                        yield outputs
        cut = [self._cut_off(index) for index, assembler in enumerate(self._assemblers) if not assembler.finished]
        if rest := [*chain.from_iterable(self._held.values()), *cut]:
            yield rest

    @property
    def complete(self) -> bool:
        """All that there will ever be has come; `outputs` gives what is left of it without waiting."""
        return all(stream.done for stream in self._streams)

    @property
    def is_plain(self) -> bool:
        """One choice, of whose tokens only the text is wanted."""
        sampling = self.task.sampling[0]
        wants_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        return self.task.num_choices == 1 and self._assemblers[0].is_plain and not wants_logprobs and not self.task.score_only

    def shorten(self, shortcut: Callable[[int], bool]) -> None:
        """Where `is_plain`: `shortcut` gets each token that comes while whoever reads `outputs` has had all others and waits.

        It takes the token by `take_plain`, or answers False, and the token is one of `outputs`.
        """
        self._streams[0].shortcut = shortcut

    def take_plain(self, token_id: int) -> str:
        """The text of a token that does not become one of `outputs`."""
        self.usage.completion_tokens += 1
        now = time.time()
        self._observe_gap(now - self.last_output)
        self.last_output = now
        return self._assemblers[0].take_plain(token_id)

    async def abort(self) -> None:
        """End everything now; `outputs` then gives each open choice its end, with what it has. Idempotent."""
        for stream in self._streams:
            await stream.abort()

    async def close(self) -> None:
        """Whatever way the request ended: nothing of it goes on in the engine. Idempotent, and never suspends."""
        if self.closed:
            return
        self.closed = True
        await self.abort()
        for index in range(self.task.num_choices):
            if index not in self.reasons:
                self._ended(index, FinishReason.ABORT)
        self._observer.closed(self)

    # What an update brings

    async def _digest(self, prompt: int, update: RequestUpdate) -> list[ChoiceOutput]:
        """What may be said now. An echo begins with the logprobs of its prompt: what comes before them is held back."""
        for part in update.prompt_logprobs:
            self.prompt_logprobs[prompt].add(part)
        outputs: list[ChoiceOutput] = []
        for delta in update.deltas:
            output = self._assemble(prompt, delta)
            if output.finish_reason is not None:
                await self._end(prompt, delta.choice, output)
            if self.task.score_only:
                output = ChoiceOutput(output.index, finish_reason=output.finish_reason)
            self.usage.completion_tokens += len(output.token_ids)
            if not output.empty:
                outputs.append(output)
        self._note_time(outputs)
        if prompt in self._held:
            outputs = [*self._held.pop(prompt), *outputs]
        if self._echoes_logprobs and self._lacks_prompt_logprobs(prompt):
            self._held[prompt] = outputs
            return []
        return outputs

    def _assemble(self, prompt: int, delta: ChoiceDelta) -> ChoiceOutput:
        """An empty output where the choice has ended already."""
        if delta.finished is not None:
            self._note_final(prompt, delta.finished)
        return self._assemblers[prompt * self.task.n + delta.choice].feed(delta.token_ids, delta.logprobs, delta.finished)

    async def _end(self, prompt: int, choice: int, output: ChoiceOutput) -> None:
        assert output.finish_reason is not None
        self._ended(output.index, output.finish_reason)
        if output.finish_reason == FinishReason.ERROR:
            error = output.error or "The engine could not go on with this request."
            raise (BadRequest if error.startswith(INVALID_REQUEST) else GenerationError)(sanitize_message(error))
        if isinstance(output.stop_reason, str):  # found here, not by the engine: it must be told
            await self._streams[prompt].stop(choice, self._assemblers[output.index].num_tokens, output.stop_reason)

    def _cut_off(self, index: int) -> ChoiceOutput:
        """The end of a choice that was aborted here, with the text that was held back: the engine's word will not come."""
        output = self._assemblers[index].abort()
        self._ended(index, FinishReason.ABORT)
        return ChoiceOutput(index, finish_reason=FinishReason.ABORT) if self.task.score_only else output

    def _ended(self, index: int, reason: FinishReason) -> None:
        if index not in self.reasons:
            self.reasons[index] = reason
            self._observer.choice_ended(self, index, reason)

    def _note_final(self, prompt: int, finished: FinishedOutput) -> None:
        if prompt not in self.finals:
            self.usage.cached_tokens += finished.num_cached_tokens
        self.finals[prompt] = finished

    def _lacks_prompt_logprobs(self, prompt: int) -> bool:
        return self.task.sampling[prompt].prompt_logprobs is not None and not self.prompt_logprobs[prompt].complete

    def _note_time(self, outputs: list[ChoiceOutput]) -> None:
        for output in outputs:
            if output.token_ids:
                now = time.time()
                if self.first_output:
                    self._observe_gap(now - self.last_output)
                else:
                    self.first_output = now
                    self._observe_gap = self._observer.first_output(self, now)
                self.last_output = now
                return


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestUpdate]]:
    """The updates of all streams as they come, each with its stream's place. A stream waits while its last update is not taken, and
    merges meanwhile."""
    queue: asyncio.Queue[tuple[int, RequestUpdate | None]] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(place, stream, queue)) for place, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            place, update_or_end = await queue.get()
            if update_or_end is None:
                open_streams -= 1
            else:
                yield place, update_or_end
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(place: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, RequestUpdate | None]]) -> None:
    async for update in stream:
        await queue.put((place, update))
    await queue.put((place, None))
