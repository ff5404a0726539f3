"""Interprets an error of redis-py: Redis cannot serve now, it never will, or only the call was wrong.

All code that speaks to Redis asks here, so that one state of Redis has one name and one consequence.
"""

from __future__ import annotations

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from engine.bus.call import BusUnavailable, Fenced, Trouble, UnfitRedis, Unowned

# By the first words of an error: redis-py has no class for some, and none for those of a pipeline's commands.
_BY_WORDS = {
    "BUSY ": Trouble.BUSY,
    "DENIED ": Trouble.PROTECTED,
    "LOADING ": Trouble.LOADING,
    "MASTERDOWN ": Trouble.MASTER,
    "MISCONF ": Trouble.DISK,
    "NOAUTH ": Trouble.PASSWORD,
    "NOREPLICAS ": Trouble.REPLICAS,
    "OOM ": Trouble.MEMORY,
    "READONLY ": Trouble.READ_ONLY,
    "UNBLOCKED ": Trouble.READ_ONLY,  # a master that becomes a replica ends the reads that wait in it
    "WRONGPASS ": Trouble.PASSWORD,
    "max number of clients": Trouble.CLIENTS,
}
_BY_CLASS: tuple[tuple[type[Exception], Trouble], ...] = (
    (BusyLoadingError, Trouble.LOADING),
    (ReadOnlyError, Trouble.READ_ONLY),
    (OutOfMemoryError, Trouble.MEMORY),
    (MasterDownError, Trouble.MASTER),
    (AuthenticationError, Trouble.PASSWORD),
    (AuthorizationError, Trouble.PASSWORD),
    (ConnectionError, Trouble.AWAY),
    (TimeoutError, Trouble.AWAY),
    (OSError, Trouble.AWAY),
)
# It will never serve under this URL: there is no such database (another error is that the user has not the rights).
_UNFIT = ("DB index is out of range", "SELECT is not allowed")
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # of OpenSSL, somewhere in the message
_ANNOTATION = " caused error: "  # of redis-py, before the error of a command in a pipeline
_GENERIC = "ERR "  # the first word of errors that have none of their own


def trouble_of(error: Exception) -> Trouble | None:
    """None: the error says nothing of Redis' own state."""
    message = _message(error)
    if _UNTRUSTED in message:
        return Trouble.CERTIFICATE
    worded = (trouble for words, trouble in _BY_WORDS.items() if message.startswith(words))
    return next(worded, None) or next((trouble for kind, trouble in _BY_CLASS if isinstance(error, kind)), None)


def as_bus_error(error: Exception) -> Exception:
    """An error of redis-py as the callers of the bus know it: BusUnavailable, UnfitRedis, Fenced, Unowned, or, for any other,
    itself."""
    message = _message(error)
    if isinstance(error, ResponseError) and message.startswith("FENCED"):
        return Fenced(message)
    if isinstance(error, ResponseError) and message.startswith("UNOWNED"):
        return Unowned(message)
    if isinstance(error, NoPermissionError) or message.startswith(_UNFIT):
        return UnfitRedis(f"Redis: {message}")
    trouble = trouble_of(error)
    if trouble is None:
        return error
    if trouble is Trouble.PROTECTED:
        message = message.partition(". ")[0]  # then comes a page of advice
    return BusUnavailable(message or "no answer in time", trouble)


def _message(error: Exception) -> str:
    return str(error).rpartition(_ANNOTATION)[2].lstrip("('\"").removeprefix(_GENERIC)
