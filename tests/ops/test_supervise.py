"""The supervisor with small stand-in children: restart, giving up, signals, forced stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import child as children
from ops.child import Child, ChildFailed
from ops.supervise import Supervisor
from tests.ops.stand_ins import READY, SLEEP, Watched, command, gone
from tests.waiting import wait_for_async


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY", 0.01)


async def run_until_signal(bring_up: Callable[[Supervisor], Any], *signals: signal.Signals) -> int:
    """The supervisor in this very process; once everything is up, it gets the signals."""
    supervisor = Supervisor()

    async def everything() -> None:
        await bring_up(supervisor)
        for number in signals:
            os.kill(os.getpid(), number)

    async with asyncio.timeout(20):
        return await supervisor.run(everything())


async def test_a_child_is_started_again_and_its_death_reported(tmp_path: Path) -> None:
    """The child kills itself the first two times and stays the third."""
    counter = tmp_path / "starts"
    watched = Watched(
        command(
            "flaky",
            f"path = {str(counter)!r}",
            "open(path, 'a').write('x')",
            READY,
            "print('about to fall', flush=True)",
            "import os, signal",
            "if len(open(path).read()) < 3: os.kill(os.getpid(), signal.SIGKILL)",
            SLEEP,
        )
    )

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await wait_for_async(lambda: watched.lines.count("about to fall") == 3, "three starts")
        await watched.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert [ended.status for ended in watched.exits] == [-signal.SIGKILL] * 2
    assert [str(ended) for ended in watched.exits] == ["killed by SIGKILL"] * 2
    assert len({ended.pid for ended in watched.exits}) == 2


async def test_a_child_that_is_stopped_while_its_death_is_dealt_with_is_no_failure() -> None:
    async def stop_it(ended: children.Exit) -> None:
        await child.stop()

    child = Child(command("hopeless", f"import sys; sys.exit({os.EX_CONFIG})"), on_line=print, on_exit=stop_it)
    async with asyncio.timeout(20):
        await child.run()


async def test_a_successor_takes_over_when_it_is_ready_and_only_then(tmp_path: Path) -> None:
    """The second process of the command is not able to start, the third is."""
    counter = tmp_path / "starts"
    lines = [f"path = {str(counter)!r}", "open(path, 'a').write('x')", "import sys", "if len(open(path).read()) == 2: sys.exit(3)"]
    watched = Watched(command("server", *lines, READY, SLEEP))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await watched.child.ready.wait()
        first = watched.child.pid
        with pytest.raises(ChildFailed, match="server did not come up: exit status 3"):
            await supervisor.replace(watched.child, signal.SIGUSR2, 5.0)
        assert (supervisor.children, watched.child.pid) == ([watched.child], first)
        await supervisor.replace(watched.child, signal.SIGUSR2, 5.0)
        (successor,) = supervisor.children
        assert successor.pid is not None and watched.child.pid is None
        assert [ended.pid for ended in watched.exits] == [first]
        assert watched.exits[0].status == -signal.SIGUSR2

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0


ALIVE = READY.replace("ready", "alive")


async def test_a_child_that_falls_silent_is_killed_and_started_again() -> None:
    watched = Watched(command("quiet", ALIVE, SLEEP, patience=0.6))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await wait_for_async(lambda: len(watched.exits) == 1, "its death")
        await wait_for_async(lambda: watched.child.pid not in (None, watched.exits[0].pid), "the next one")

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert watched.exits[0].was_silent and str(watched.exits[0]) == "it showed no sign of life"
    assert not watched.reports, "signs of life are no news"


async def test_a_child_that_has_not_begun_to_tell_is_waited_for() -> None:
    """It loads."""
    watched = Watched(command("loading", "import time; time.sleep(2)", READY, SLEEP, patience=0.6))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await watched.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert not watched.exits


async def test_a_child_that_is_not_urgent_begins_when_it_may() -> None:
    others_are_up = asyncio.Event()
    watched = Watched(command("patient", "print('here', flush=True)", READY, SLEEP, not_before=others_are_up.wait))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        other = Watched(command("urgent", READY, SLEEP)).child
        supervisor.start(other)
        await other.ready.wait()
        assert watched.child.pid is None
        others_are_up.set()
        await watched.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert watched.lines == ["here"]


async def test_a_child_that_may_not_begin_yet_is_stopped_like_others() -> None:
    watched = Watched(command("patient", READY, not_before=asyncio.Event().wait))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert not watched.reports


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
async def test_a_signal_stops_the_stages_last_to_first(number: signal.Signals, status: int) -> None:
    order: list[str] = []

    def stage(name: str) -> Child:
        code = [
            "import signal, sys",
            "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))",
            READY,
            SLEEP,
        ]
        return Child(command(name, *code), on_line=lambda line: order.append(name), on_progress=lambda _: None)

    async def bring_up(supervisor: Supervisor) -> None:
        for child in (stage("redis"), stage("engine"), stage("api")):
            supervisor.start(child)
            await child.ready.wait()

    assert await run_until_signal(bring_up, number) == status
    assert order == ["api", "engine", "redis"]


async def test_a_child_that_ignores_the_signal_is_killed_after_its_time() -> None:
    deaf = Watched(
        command("deaf", "import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", READY, SLEEP, stop_timeout=0.1)
    )

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(deaf.child)
        await deaf.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert deaf.child.pid is None


async def test_a_second_signal_kills() -> None:
    deaf = Watched(command("deaf", "import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", READY, SLEEP, stop_timeout=60))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(deaf.child)
        await deaf.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM, signal.SIGINT) == 128 + signal.SIGINT
    assert deaf.child.pid is None


async def test_a_second_signal_neither_tells_of_restarts_nor_does_them(caplog: pytest.LogCaptureFixture) -> None:
    """The earlier stage is not being stopped yet when the end is forced."""
    redis = Watched(command("redis", "print('here', flush=True)", READY, SLEEP))
    deaf = Watched(command("deaf", "import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", READY, SLEEP, stop_timeout=60))

    async def bring_up(supervisor: Supervisor) -> None:
        for each in (redis, deaf):
            supervisor.start(each.child)
            await each.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM, signal.SIGINT) == 128 + signal.SIGINT
    assert (redis.lines, redis.exits, redis.child.pid) == (["here"], [], None)
    assert "died" not in caplog.text


async def test_a_configuration_error_is_not_tried_again() -> None:
    report = 'os.write(int(sys.argv[-1]), b\'{"phase": "failed", "message": "too big"}\\n\')'
    watched = Watched(command("engine", "import os, sys", report, "sys.exit(os.EX_CONFIG)"))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await watched.child.ready.wait()

    with pytest.raises(ChildFailed, match=r"^too big$"):
        await run_until_signal(bring_up)
    assert len(watched.exits) == 1


async def test_a_child_that_never_starts_is_given_up() -> None:
    watched = Watched(command("engine", "import sys", "print('no such library', file=sys.stderr)", "sys.exit(3)"))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)

    with pytest.raises(ChildFailed, match="engine did not start in 4 attempts; the last one: exit status 3: no such library"):
        await run_until_signal(bring_up)


async def test_the_reason_of_a_death_is_the_message_of_a_json_log_line() -> None:
    line = """print('{"level": "error", "message": "no such library"}', file=sys.stderr)"""
    watched = Watched(command("api", "import os, sys", line, "sys.exit(os.EX_CONFIG)"))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await watched.child.ready.wait()

    with pytest.raises(ChildFailed, match=r"^no such library$"):
        await run_until_signal(bring_up)


async def test_a_child_that_is_not_essential_does_not_end_the_supervisor() -> None:
    extra = Watched(command("worker", "import sys", "sys.exit(78)", essential=False))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(extra.child)
        await wait_for_async(lambda: len(extra.exits) > children.START_ATTEMPTS, "more attempts than others have")

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0


async def test_a_replica_that_served_is_restarted_while_another_serves(tmp_path: Path) -> None:
    """One that has served says on its second start that it cannot run."""
    lasting = Watched(command("engine-0", READY, SLEEP), others_serve=lambda _: failing.child.ready.is_set())
    mark = str(tmp_path / "started")
    lines = ["import os, sys", f"os.path.exists({mark!r}) and sys.exit(os.EX_CONFIG)", f"open({mark!r}, 'w').close()", READY]
    failing = Watched(command("engine-1", *lines), others_serve=lambda _: lasting.child.ready.is_set())

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(lasting.child, failing.child)
        await lasting.child.ready.wait()
        await wait_for_async(lambda: len(failing.exits) >= 3, "three ends")
        assert failing.exits[-1].status == os.EX_CONFIG
        assert lasting.child.pid is not None
        os.kill(lasting.child.pid, signal.SIGKILL)
        await lasting.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0


async def test_the_owner_of_a_child_may_handle_its_failure() -> None:
    told: list[str] = []

    def take(failure: ChildFailed) -> bool:
        told.append(str(failure))
        return True

    failing = Child(command("engine-0", "import sys", "sys.exit(78)"), on_line=told.append, on_failure=take)
    instead = Watched(command("engine", READY, SLEEP))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(failing)
        await wait_for_async(lambda: told, "the failure")
        await failing.stop()
        supervisor.start(instead.child, instead_of=[failing])
        await instead.child.ready.wait()

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    assert told == ["engine-0 cannot run with this configuration"]


async def test_processes_that_a_child_started_die_with_it() -> None:
    lines = [
        "import os, signal, subprocess, sys",
        "print(subprocess.Popen(['sleep', '1000']).pid, flush=True)",
        READY,
        "signal.pause()",
    ]
    watched = Watched(command("engine", *lines))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await watched.child.ready.wait()
        await wait_for_async(lambda: watched.lines, "the grandchild's pid")
        assert watched.child.pid is not None
        os.kill(watched.child.pid, signal.SIGKILL)
        await wait_for_async(lambda: watched.exits, "the child's end")

    assert await run_until_signal(bring_up, signal.SIGTERM) == 0
    await asyncio.to_thread(gone, int(watched.lines[0]))


async def test_a_line_without_end_is_cut() -> None:
    watched = Watched(command("loud", "import sys", "sys.stdout.write('x' * 1000000)", "sys.stdout.flush()", READY, SLEEP))

    async def bring_up(supervisor: Supervisor) -> None:
        supervisor.start(watched.child)
        await watched.child.ready.wait()

    await run_until_signal(bring_up, signal.SIGTERM)
    assert sum(map(len, watched.lines)) == 1000000
    assert max(map(len, watched.lines)) <= 2 * children.LONGEST_LINE
