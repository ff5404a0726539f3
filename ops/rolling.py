"""Replaces the processes of a running `serve` one by one, so that no request fails: for another version, or after a leak."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from ops.child import Child
from ops.errors import CommandError
from ops.supervise import Supervisor

log = logging.getLogger(__name__)

ROLES = ("engine", "api", "maintenance")  # in the order in which they are replaced


class Rolling:
    """`has_room_beside`: whether another engine has room beside this one."""

    def __init__(self, supervisor: Supervisor, has_room_beside: Callable[[Child], bool]) -> None:
        self._supervisor = supervisor
        self._has_room_beside = has_room_beside
        self._busy = asyncio.Lock()

    async def roll(self, names: Sequence[str], seconds: float, say: Callable[[str], None]) -> None:
        """Replace the processes of these names or roles, or all; `seconds` are what an API server gets to finish its streams.

        Raises CommandError for an unknown name, and ChildFailed, which is one, at the first process that cannot be replaced.
        """
        if self._busy.locked():
            raise CommandError("another restart is under way")
        async with self._busy:
            for child in self._chosen(names):
                before = child.pid
                log.info("%s is being replaced", child.name)
                await self._replace(child, seconds)
                say(f"{child.name}: process {before} was replaced")

    def _chosen(self, names: Sequence[str]) -> list[Child]:
        children = sorted(
            (child for child in self._supervisor.children if _role(child) in ROLES), key=lambda child: ROLES.index(_role(child))
        )
        known = {name for child in children for name in (child.name, _role(child))}
        if unknown := set(names) - known:
            raise CommandError(f"there is no process `{min(unknown)}`; there are {', '.join(child.name for child in children)}")
        return [child for child in children if not names or {child.name, _role(child)} & set(names)]

    async def _replace(self, child: Child, seconds: float) -> None:
        role = _role(child)
        if role == "api":  # both share the listening socket
            await self._supervisor.replace(child, signal.SIGUSR2, seconds)
        elif role == "engine" and not self._supervisor.others_serve(child) and self._has_room_beside(child):
            await self._supervisor.replace(child, signal.SIGTERM, seconds)
        else:  # an engine's requests go on at the other engines, or wait for the new one
            await child.restart()


def _role(child: Child) -> str:
    return child.name.rstrip("0123456789").rstrip("-")
