"""API keys, of settings and of a file that is read again when it changes. Their SHA-256 is kept, and compared in constant time.

A key is one entry, `NAME=KEY` or `NAME:admin=KEY`. `sha256:` and 64 hex digits in place of KEY give its hash instead.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.errors import ConfigurationError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at whether the file has changed
_HASH = "sha256:"
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_FORM = "an API key must be NAME=KEY or NAME:admin=KEY; KEY may be sha256: and 64 hex digits"


@dataclass(frozen=True)
class Principal:
    """The holder of a key. `tenant` is the key's name, "" where no keys are configured."""

    tenant: str = ""
    admin: bool = False

    def may_see(self, tenant: str) -> bool:
        """Whether a request of `tenant` is this principal's to list, inspect and abort."""
        return self.admin or tenant == self.tenant


EVERYBODY = Principal(admin=True)
_Key = tuple[bytes, Principal]  # with the key's hash


class KeyRing:
    """The keys of `entries` and of `file`. Raises ConfigurationError for an entry that is none, and a file that cannot be read.

    The file is looked at once a second at most. While it cannot be read, or has a line that is no key, the keys that it had before
    are good.
    """

    def __init__(self, entries: Sequence[str], file: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._given = [_key(entry) for entry in entries]
        self._file = Path(file) if file else None
        self._clock = clock
        self._version: tuple[int, ...] = ()
        self._next_look = 0.0
        self._filed: list[_Key] = []
        if self._file is not None:
            self._version, self._filed = _version(self._file), _read(self._file)
            self._next_look = clock() + LOOK_SECONDS

    @property
    def open(self) -> bool:
        """No key is asked for. A file without keys lets nobody in."""
        return not self._given and self._file is None

    def identify(self, authorization: str | None, api_key: str | None = None) -> Principal | None:
        """The owner of the key in a `Bearer` header, else in `x-api-key`; or None. Takes the same time whichever key matches."""
        if self.open:
            return EVERYBODY
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" and api_key is not None:
            scheme, key = "bearer", api_key
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Principal | None = None
        for known, principal in (*self._given, *self._filed):
            if hmac.compare_digest(known, digest):
                found = principal
        return found if scheme.lower() == "bearer" else None

    def _look(self) -> None:
        """Read the file again if it has changed."""
        if self._file is None or self._clock() < self._next_look:
            return
        self._next_look = self._clock() + LOOK_SECONDS
        version = _version(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            self._filed = _read(self._file)
        except ConfigurationError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%s was read again: %d API keys", self._file, len(self._filed))


def _read(file: Path) -> list[_Key]:
    """A key a line; empty lines and those that begin with # count for nothing."""
    try:
        lines = file.read_text("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise ConfigurationError(f"the file of API keys {file} cannot be read: {error.strerror}") from None
    return list(_keys_of(file, lines))


def _keys_of(file: Path, lines: Sequence[str]) -> Iterable[_Key]:
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                yield _key(line)
            except ConfigurationError as error:
                raise ConfigurationError(f"{file}, line {number}: {error}") from None


def _version(file: Path) -> tuple[int, ...]:
    """Another one after each change; none while there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _key(entry: str) -> _Key:
    """The message of its ConfigurationError shows nothing of the entry, which may be a key."""
    owner, separator, key = entry.partition("=")
    name, colon, role = owner.partition(":")
    if not separator or not name or not key or (colon and role != "admin"):
        raise ConfigurationError(_FORM)
    return _digest(key), Principal(name, admin=role == "admin")


def _digest(key: str) -> bytes:
    if not key.startswith(_HASH):
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    if not _HEX.fullmatch(key.removeprefix(_HASH)):
        raise ConfigurationError(_FORM)
    return bytes.fromhex(key.removeprefix(_HASH))
