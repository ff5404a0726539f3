"""The engine's main loop: take requests and commands in, step, give outputs out, until told to stop.

The core runs on the main thread. Around it: `Intake` (requests and control commands from Redis), `Publisher` (outputs to Redis) and
`Heartbeat`, each a thread; they meet the core only through two queues and a snapshot. A `Watchdog` looks at all of it.
"""

from __future__ import annotations

import logging
import math
import queue
import time

import msgspec

from engine.bus import failover
from engine.bus.call import BusUnavailable, Fenced
from engine.protocol import Abort, Attach, ControlCommand, ControlReply, FinishReason, Replay, Utility
from engine.runtime.core import EngineCore
from engine.runtime.folding import FoldedChoice, FoldedOutput
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.held_requests import HeldRequest, HeldRequests, output_logprobs, output_prompt_logprobs
from engine.runtime.intake import Arrival, Intake
from engine.runtime.kv_pressure import KVPressure
from engine.runtime.publisher import Publisher, StepEvents
from engine.runtime.reconciliation import Forget, StoreOutputs
from engine.runtime.replay import replay
from engine.runtime.service_rate import ServiceRate
from engine.runtime.slot_owner import SlotOwner
from engine.runtime.utility_calls import UtilityCalls
from engine.runtime.watchdog import Watchdog
from engine.scheduling.request import TOKEN_BYTES, Request
from engine.scheduling.step_outputs import StepOutputs
from gpu.plan import Int32Array

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25  # how often an idle engine looks after its workers


class EngineLoop:
    """Owns the core and the requests that it holds. `run` returns after `stop`, or raises the error that ended it."""

    def __init__(self, core: EngineCore, model: str, clients: list[str]) -> None:
        self.core = core
        self.model = model
        self.held = HeldRequests()
        self.inbox: queue.SimpleQueue[Arrival | ControlCommand | Forget | StoreOutputs | None] = queue.SimpleQueue()
        self._clients = clients
        self._client_index: dict[str, int] = {}
        self._stopping = False
        self._deadline = math.inf  # monotonic
        self._failure: BaseException | None = None
        self._postponed: list[Arrival] = []  # requests that cannot be admitted yet
        self._pressure = KVPressure(core.limits)
        self._service_rate = ServiceRate()

    def attach(self, owner: SlotOwner, intake: Intake, publisher: Publisher, heartbeat: Heartbeat, watchdog: Watchdog) -> None:
        self.owner = owner
        self.intake, self.publisher, self.heartbeat, self.watchdog = intake, publisher, heartbeat, watchdog
        self._utilities = UtilityCalls(self.core, intake, heartbeat, self.stop)

    def run(self) -> None:
        """The main loop."""
        self._publish_snapshot()
        for side in (self.publisher, self.intake, self.heartbeat, self.watchdog):
            side.start()
        try:
            while not self._over():
                self.watchdog.turns += 1
                self._take_in()
                outputs = self.core.step()
                if outputs is not None:
                    self._give_out(outputs)
                if self.intake.wants_room and self.core.scheduler.num_free_request_slots > 0:
                    self.intake.ring()
                if self.heartbeat.wants_snapshot:
                    self._publish_snapshot()
                if outputs is not None and not self.core.has_work:
                    self._publish_snapshot()
                    self.heartbeat.hurry()
        except BaseException:
            self._hand_over(blame=True)
            raise
        self._hand_over(blame=False)

    def stop(self, timeout: float = 0.0) -> None:
        """Take no more requests; after `timeout` seconds leave what still runs to the next engine; then return from `run`.

        Until then aborts are obeyed. Asked again, the shorter time counts. Safe in a signal handler: it takes no lock, which the
        code that it interrupts might hold.
        """
        self._deadline = min(self._deadline, time.monotonic() + timeout)
        self._stopping = True
        self.intake.closed = True
        self.publisher.give_up_at(self._deadline)
        self.inbox.put(None)

    def fail(self, error: BaseException) -> None:
        """A side thread cannot go on: neither can the engine."""
        self._failure = self._failure or error
        self.inbox.put(None)

    def _over(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._stopping and (not self.core.has_work or time.monotonic() >= self._deadline)

    # In

    def _take_in(self) -> None:
        """Everything that waits in the inbox; when there is nothing to compute, wait for something."""
        events = StepEvents()
        again, self._postponed = self._postponed, []
        for arrival in again:
            self._admit_when_ready(arrival, events)
        wait = not self.core.has_work
        while True:
            try:
                item = self.inbox.get(block=wait, timeout=IDLE_SECONDS if wait else None)
            except queue.Empty:
                break
            wait = False
            if isinstance(item, Arrival):
                self._admit_when_ready(item, events)
            elif isinstance(item, Forget):
                self._forget(item)
            elif isinstance(item, StoreOutputs):
                self._store_outputs(events)
            elif item is not None:
                self._obey(item, events)
        self.core.executor.check_health()
        if events:
            self.publisher.put(events)

    def _admit_when_ready(self, arrival: Arrival, events: StepEvents) -> None:
        """A request that was forgotten here may come again, from a dead engine, before its choices have closed. A grammar is
        compiled first."""
        is_compiled = arrival.grammar is None or arrival.grammar.done()
        if self.held.is_closing(arrival.source.request_id) or not is_compiled:
            self._postponed.append(arrival)
        else:
            self._admit(arrival, events)
            self._count_admitted(arrival)

    def _count_admitted(self, arrival: Arrival) -> None:
        """Once the scheduler counts it: a request is here or on its way, at any time."""
        self.intake.num_admitted += len(arrival.choices)
        self.intake.tokens_admitted += len(arrival.source.prompt_token_ids) // TOKEN_BYTES

    def _admit(self, arrival: Arrival, events: StepEvents) -> None:
        source = arrival.source
        held = HeldRequest(source, arrival.choices, folded=arrival.folded)
        orders = (*arrival.orders, *self.held.add(held))
        held.promises += orders
        client = self._index_of(source.client)
        for request in held.choices:
            request.client = client
            if request.status.finished:  # another engine ended it and counted that; its client may not know yet
                self._close(request, events)
        if arrival.grammar is not None and (why_not := arrival.grammar.result()):
            self._end(held, why_not, events)
            return
        try:
            for request in held.choices:
                if not request.status.finished:
                    self._obey_orders(request, orders)
                    self.core.add_request(request)
        except Exception as error:
            logger.exception("request %s cannot be admitted", source.request_id)
            self._end(held, f"The engine cannot admit the request: {type(error).__name__}: {error}", events)
        if (attach := self.held.take_early_attach(source.request_id)) is not None:
            self._attach(attach)

    def _obey_orders(self, request: Request, orders: tuple[Abort, ...]) -> None:
        """The first order that names the choice ends it before a token is computed. A stop string that was found behind tokens that
        are lost ends it there again."""
        order = next((order for order in orders if order.choice in (-1, request.choice)), None)
        if order is None:
            return
        if order.reason is FinishReason.STOP and order.keep > request.num_output_tokens:
            request.ordered_stop = order.keep, order.stop_reason
        else:
            request.end(order.reason, order.keep, order.stop_reason, order.error, self.core.clock())

    def _end(self, held: HeldRequest, error: str, events: StepEvents) -> None:
        """End a request whose choices may or may not have reached the core."""
        self.core.finish(held.source.request_id, reason=FinishReason.ERROR, error=error)
        for request in held.choices:
            if request.finish_reason is None:
                request.end(FinishReason.ERROR, -1, None, error, self.core.clock())
                self._close(request, events)

    def _obey(self, command: ControlCommand, events: StepEvents) -> None:
        """No command ends the engine: one that fails is answered with its error."""
        try:
            if isinstance(command, Abort):
                self._abort(command, events)
            elif isinstance(command, Attach):
                self._attach(command)
            elif isinstance(command, Replay):
                events.replays.append((command.client, replay(command, self.held, self._tokens_of)))
            else:
                self._run_utility(command, events)
        except Exception as error:
            logger.exception("a command failed: %s", command)
            if isinstance(command, Abort | Utility) and command.reply_to:
                reply = ControlReply(command.token, ok=False, error=f"{type(error).__name__}: {error}")
                events.replies.append((command.reply_to, reply))

    def _attach(self, command: Attach) -> None:
        held = self.held.get(command.request_id)
        if held is None:
            self.held.remember_attach(command)
            return
        held.source = msgspec.structs.replace(held.source, client=command.client, handle=command.handle)
        self.intake.attach(held.source)
        client = self._index_of(command.client)
        for request in held.choices:
            self.core.scheduler.readdress(request, client, command.handle)

    def _abort(self, command: Abort, events: StepEvents) -> None:
        held = self.held.get(command.request_id)
        if held is None:
            self.held.remember_abort(command)
        else:
            self.core.finish(command.request_id, command.choice, command.reason, command.keep, command.stop_reason, command.error)
        if held is not None and held.is_open(command.choice):
            held.promises.append(command)  # kept when the blocks are free
        else:
            self._confirm(command, held, events)

    def _confirm(self, command: Abort, held: HeldRequest | None, events: StepEvents) -> None:
        if command.reply_to:
            num_tokens = 0 if held is None else self._num_output_tokens(held)
            events.replies.append((command.reply_to, ControlReply(command.token, num_tokens=num_tokens)))

    def _run_utility(self, command: Utility, events: StepEvents) -> None:
        reply = self._utilities.run(command)
        if command.reply_to:
            events.replies.append((command.reply_to, reply))

    # Out

    def _give_out(self, outputs: StepOutputs) -> None:
        events = StepEvents(outputs)
        for request, offset, entry in outputs.logprobs:
            told = output_logprobs(request, offset, entry)
            self.held.of(request).logprobs[request.choice].append(told)
            events.logprobs.append((request.client, told))
        for request, prompt_entry in outputs.prompt_logprobs:
            prompt_told = output_prompt_logprobs(request, prompt_entry)
            self.held.of(request).prompt_logprobs.append(prompt_told)
            events.prompt_logprobs.append((request.client, prompt_told))
        events.started = [self.held.of(request) for request in outputs.started if request.choice == 0]
        for request in outputs.finished:
            self._close(request, events)
        if events:
            self.publisher.put(events)

    def _close(self, request: Request, events: StepEvents) -> None:
        """The end of a choice, which holds nothing any more, and what was promised for then."""
        held = self.held.of(request)
        if held.is_foreign:
            self.held.close_choice(request)
            return
        events.ended_choices.append((held, request))
        if self.held.close_choice(request) is not None:
            events.ended.append(held)
            self.intake.ring()  # there is room again
        for command in held.take_due_promises():
            self._confirm(command, held, events)

    def _forget(self, command: Forget) -> None:
        """Requests that another engine has, or that ended elsewhere, end here without a word."""
        for request_id in command.ids:
            held = self.held.get(request_id)
            if held is not None:
                held.is_foreign = True
                self.core.finish(request_id)
        for arrival in [each for each in self._postponed if each.source.request_id in command.ids]:
            self._postponed.remove(arrival)
            self._count_admitted(arrival)

    def _store_outputs(self, events: StepEvents) -> None:
        """All that the requests held here have put out, for a checkpoint."""
        for held in self.held.all():
            events.stored.append((held.source.request_id, self._whole_output(held).as_message(held.source.handle)))

    def _hand_over(self, blame: bool) -> None:
        """Flush what is there, then leave the rest to the next engine: it goes on with the output that Redis has. `blame`: one of
        the requests may be why this engine ends."""
        self.watchdog.stop()
        self.intake.stop()
        self.intake.join(timeout=2.0)
        self.publisher.close(timeout=2.0)
        self.heartbeat.stop()
        owner = self.owner
        try:
            left = owner.run(failover.takeover(owner.model, owner.slot, owner.incarnation, sure=True, blame=blame))
        except (BusUnavailable, Fenced) as error:
            logger.warning("the slot could not be given back, its heartbeat will be missed: %s", error)
        else:
            if left.orphaned:
                logger.warning("%d requests are left to the next engine", left.orphaned)

    # Looking

    def _whole_output(self, held: HeldRequest) -> FoldedOutput:
        choices = [
            FoldedChoice(
                self._tokens_of(request, 0),
                held.logprobs[request.choice],
                None if held.is_open(request.choice) else held.finished_output(request),
            )
            for request in held.choices
        ]
        return FoldedOutput(choices, held.prompt_logprobs)

    def _tokens_of(self, request: Request, offset: int) -> Int32Array:
        """A choice's output tokens so far, from the offset on."""
        if request.finish_reason is not None:
            return request.output_token_ids[offset:]
        return self.core.scheduler.output_token_ids(request.request_id, request.choice, offset)

    def _publish_snapshot(self) -> None:
        """Counters, and output tokens so far of every request held, those that run apart from those that wait."""
        progress: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for held in self.held.all():
            place = waiting if all(request.status.waits for request in held.choices) else progress
            place[held.source.request_id] = self._num_output_tokens(held)
        stats = self.core.stats()
        now = time.monotonic()
        self._pressure.look(stats, now)
        is_full = stats.num_waiting > 0 or stats.num_running >= self.core.limits.max_num_seqs
        stats.choices_per_second = self._service_rate.look(now, sum(stats.finished.values()), is_full)
        self.heartbeat.publish(stats, progress, waiting)

    def _num_output_tokens(self, held: HeldRequest) -> int:
        return sum(map(self.core.scheduler.num_output_tokens, held.choices))

    def _index_of(self, client: str) -> int:
        if client not in self._client_index:
            self._client_index[client] = len(self._clients)
            self._clients.append(client)
        return self._client_index[client]
