"""The children of `serve` in stages: started in order, replaced one by one, stopped in order."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ops.child import Child, ChildFailed

log = logging.getLogger(__name__)


class Supervisor:
    """Children in stages: started first to last, stopped last to first, the children of one stage together."""

    def __init__(self, on_stop: Callable[[], None] = lambda: None) -> None:
        """`on_stop` is called before the first child is stopped."""
        self._on_stop = on_stop
        self._stages: list[list[Child]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        self._forced: signal.Signals | None = None

    async def run(self, bring_up: Coroutine[Any, Any, None]) -> int:
        """Run until a signal and return the exit status, or raise the failure of `bring_up` or of a child. No child is left.

        SIGTERM and SIGHUP end in status 0, SIGINT in 130 so that a shell's loop stops too; a second signal kills and ends
        in 128 + its number.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        bringing_up = loop.create_task(bring_up)
        bringing_up.add_done_callback(self._on_done)
        try:
            asked = await self._over
            log.info("%s: stopping in order; a second signal kills", asked.name)
        finally:
            bringing_up.cancel()
            self._on_stop()
            await self._stop()
            await asyncio.wait([bringing_up, *self._tasks])
        if self._forced is not None:
            return 128 + self._forced
        return 128 + asked if asked == signal.SIGINT else 0

    def start(self, *children: Child, instead_of: Sequence[Child] = ()) -> None:
        """Start the children of the next stage, or in place of those of a stage which were stopped.

        Await their `ready` to know when they serve.
        """
        if instead_of:
            self._stages[self._stages.index(list(instead_of))] = list(children)
        else:
            self._stages.append(list(children))
        for child in children:
            self._begin(child)

    def _begin(self, child: Child) -> None:
        task = asyncio.get_running_loop().create_task(child.run())
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    def others_serve(self, child: Child) -> bool:
        """Whether another child of its stage is ready."""
        return any(other.ready.is_set() for stage in self._stages if child in stage for other in stage if other is not child)

    async def replace(self, old: Child, number: signal.Signals, seconds: float) -> None:
        """Start a successor of `old`, and once that is ready retire `old` (`Child.retire`). Raises ChildFailed where it ends first:
        then `old` goes on."""
        stage = next(stage for stage in self._stages if old in stage)
        new = old.successor()
        new.is_on_trial = True
        stage.append(new)
        self._begin(new)
        try:
            await new.comes_up()
        except ChildFailed:
            stage.remove(new)
            raise
        new.is_on_trial = False
        await old.retire(number, seconds)
        stage.remove(old)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._over.done():
            self._over.set_result(number)
            return
        self._forced = number
        for stage in self._stages:
            for child in stage:
                child.kill()

    async def _stop(self) -> None:
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))
        for task in self._tasks:
            task.cancel()  # those that wait for a restart
