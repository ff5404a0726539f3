"""What may be served without keys, and the prefix cache's salts."""

from __future__ import annotations

import pytest

from api.errors import ConfigurationError
from api.http.auth import check_exposure, derive_cache_salt
from api.http.key_ring import Principal
from engine.config import ApiConfig


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
    check_exposure(ApiConfig(host=host, api_key_file="keys"))
    check_exposure(ApiConfig(host=host, allow_no_auth=True))
