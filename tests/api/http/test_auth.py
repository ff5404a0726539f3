"""Keys, and what may be served without them."""

from __future__ import annotations

import pytest

from api.errors import ConfigurationError
from api.http.auth import KeyRing, Principal, check_exposure, derive_cache_salt
from engine.config import ApiConfig

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


@pytest.mark.parametrize("entry", ["", "alice", "alice=", "=k", "alice:boss=k", ":admin=k"])
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


def test_salts_are_the_tenants_own() -> None:
    alice, bob = Principal("alice"), Principal("bob")
    assert derive_cache_salt(alice, "s") == derive_cache_salt(alice, "s")
    assert len({derive_cache_salt(who, salt) for who in (alice, bob) for salt in (None, "s", "t")}) == 6
    assert derive_cache_salt(Principal(admin=True), "s") == "s"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.3.2.1"])
def test_a_server_on_loopback_needs_no_keys(host: str) -> None:
    check_exposure(ApiConfig(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "no such host", ""])
def test_a_server_on_another_address_needs_keys(host: str) -> None:
    with pytest.raises(ConfigurationError, match="--api-key"):
        check_exposure(ApiConfig(host=host))
    check_exposure(ApiConfig(host=host, api_key=["a=b"]))
    check_exposure(ApiConfig(host=host, allow_no_auth=True))
