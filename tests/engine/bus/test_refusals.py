"""Redis' refusals as they come over the wire, by both readers of its answers: what each says of Redis."""

from __future__ import annotations

import builtins
from collections.abc import Callable

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from engine.bus.call import BusUnavailable, Fenced, Trouble, UnfitRedis
from engine.bus.refusals import as_bus_error, trouble_of
from engine.bus.resp import Answers

TROUBLES = {
    "LOADING Redis is loading the dataset in memory": Trouble.LOADING,
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": Trouble.BUSY,
    "OOM command not allowed when used memory > 'maxmemory'.": Trouble.MEMORY,
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.": Trouble.DISK,
    "MISCONF Errors writing to the AOF file: No space left on device": Trouble.DISK,
    "READONLY You can't write against a read only replica.": Trouble.READ_ONLY,
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": Trouble.READ_ONLY,
    "NOREPLICAS Not enough good replicas to write.": Trouble.REPLICAS,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": Trouble.MASTER,
    "NOAUTH Authentication required.": Trouble.PASSWORD,
    "WRONGPASS invalid username-password pair or user is disabled.": Trouble.PASSWORD,
    "ERR max number of clients reached": Trouble.CLIENTS,
    "ERR max number of clients + cluster connections reached": Trouble.CLIENTS,
    "DENIED Redis is running in protected mode because no password is set. In this mode ...": Trouble.PROTECTED,
}


def by_redis_py(line: str) -> Exception:
    error: Exception = BaseParser.parse_error(line)
    return error


def by_hiredis(line: str) -> Exception:
    (error,) = Answers().feed(f"-{line}\r\n".encode())
    assert isinstance(error, Exception)
    return error


def in_a_pipeline(line: str) -> Exception:
    return ResponseError(f"Command # 1 (SET a b) of pipeline caused error: {line}")


@pytest.mark.parametrize("read", [by_redis_py, by_hiredis, in_a_pipeline])
@pytest.mark.parametrize("line", TROUBLES)
def test_a_state_of_redis_is_told_by_its_refusal(line: str, read: Callable[[str], Exception]) -> None:
    told = as_bus_error(read(line))
    assert isinstance(told, BusUnavailable) and told.trouble is TROUBLES[line]
    assert str(told).startswith(f"Redis {TROUBLES[line]}: ") and "In this mode" not in str(told)


@pytest.mark.parametrize("read", [by_redis_py, by_hiredis])
@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("NOPERM User joe has no permissions to run the 'set' command", UnfitRedis),
        ("ERR DB index is out of range", UnfitRedis),
        ("FENCED another incarnation holds the slot", Fenced),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ResponseError),
        ("ERR unknown command 'X'", ResponseError),
    ],
)
def test_other_refusals_are_no_state_of_redis(line: str, meaning: type[Exception], read: Callable[[str], Exception]) -> None:
    assert type(as_bus_error(read(line))) is meaning
    assert trouble_of(read(line)) is None


@pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError(), OSError("unreachable"), builtins.TimeoutError()])
def test_a_broken_connection_is_a_redis_that_is_away(error: Exception) -> None:
    told = as_bus_error(error)
    assert isinstance(told, BusUnavailable) and told.trouble is Trouble.AWAY
    assert str(told) in (f"Redis is not reachable: {error}", "Redis is not reachable: no answer in time")
