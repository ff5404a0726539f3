"""Keys out of settings and out of a file that changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from api.errors import ConfigurationError
from api.http.key_ring import LOOK_SECONDS, KeyRing, Principal

KEYS = KeyRing(["alice=k1", "root:admin=k=2"])


@pytest.mark.parametrize(
    ("header", "principal"),
    [
        ("Bearer k1", Principal("alice")),
        ("bearer k1", Principal("alice")),
        ("Bearer k=2", Principal("root", admin=True)),
        ("Bearer k2", None),
        ("Basic k1", None),
        ("k1", None),
        ("", None),
        (None, None),
    ],
)
def test_a_header_identifies_the_owner_of_its_key(header: str | None, principal: Principal | None) -> None:
    assert KEYS.identify(header) == principal


@pytest.mark.parametrize("entry", ["", "alice", "alice=", "=k", "alice:boss=k", ":admin=k", "alice=sha256:k", "alice=sha256:"])
def test_entries_that_are_no_keys(entry: str) -> None:
    with pytest.raises(ConfigurationError):
        KeyRing([entry])


def test_without_keys_everybody_may_see_everything() -> None:
    nobody = KeyRing([]).identify(None)
    assert nobody is not None
    assert nobody.may_see("anyone")


def test_a_tenant_sees_its_own() -> None:
    assert Principal("alice").may_see("alice")
    assert not Principal("alice").may_see("bob")
    assert Principal("root", admin=True).may_see("bob")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    hashed = hashlib.sha256(b"k2").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# our keys\n\nbob=k=1\n ops:admin=sha256:{hashed.upper()} \r\n")
    return file


def test_keys_out_of_a_file_and_out_of_settings(file: Path) -> None:
    ring = KeyRing(["alice=k3"], str(file))
    assert [ring.identify(f"Bearer {key}") for key in ("k=1", "k2", "k3", "k4")] == [
        Principal("bob"),
        Principal("ops", admin=True),
        Principal("alice"),
        None,
    ]


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    clock = Clock()
    ring = KeyRing([], str(file), clock)
    replacement = file.with_name("new")
    replacement.write_text("carol=k5\n")
    os.replace(replacement, file)
    assert ring.identify("Bearer k5") is None, "it looks once a second at most"
    clock.now += LOOK_SECONDS
    assert ring.identify("Bearer k5") == Principal("carol")
    assert ring.identify("Bearer k2") is None


def test_what_cannot_be_read_leaves_the_keys_as_they_were(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    ring = KeyRing([], str(file), clock)
    text = file.read_text()
    for said, change in (("line 2", lambda: file.write_text("carol=k5\ns3cret\n")), ("No such file", file.unlink)):
        caplog.clear()
        change()
        for _ in range(3):  # told once
            clock.now += LOOK_SECONDS
            assert ring.identify("Bearer k2") == Principal("ops", admin=True)
        (told,) = caplog.messages
        assert said in told and str(file) in told and "s3cret" not in told
    file.write_text(text + "carol=k5\n")
    clock.now += LOOK_SECONDS
    assert ring.identify("Bearer k5") == Principal("carol")


def test_a_file_that_cannot_be_read_at_the_start_is_refused(file: Path) -> None:
    file.write_text("bob=k1\n\nsecret\n")
    with pytest.raises(ConfigurationError, match=r"keys, line 3: an API key must be NAME=KEY") as refusal:
        KeyRing([], str(file))
    assert "secret" not in str(refusal.value)
    file.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        KeyRing([], str(file))


def test_a_file_without_keys_lets_nobody_in(file: Path) -> None:
    file.write_text("")
    ring = KeyRing([], str(file))
    assert not ring.open
    assert ring.identify(None) is None is ring.identify("Bearer ")
