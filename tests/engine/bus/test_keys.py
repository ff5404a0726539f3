"""Keys: each model has one hash tag, whatever its name, and each meaning one key."""

from __future__ import annotations

import inspect
import re

import pytest

from engine.bus import keys
from engine.bus.call import LUA

NAMES = ["smollm2", "org/model:latest", "{braces}", "a}b", "%7Bodd", "", "Größe 日本"]


def every_key(model: str) -> dict[str, str]:
    """The result of each function of the module that makes a key of the model; its other parameters get numbers."""
    made = {}
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters)
        if parameters[:1] == ["model"] and name not in ("ledger",) and not name.startswith("_"):
            made[name] = function(model, *range(1, len(parameters)))
    return made


def hash_tag(key: str) -> str:
    """As Redis Cluster finds it: between the first { and the next }."""
    start = key.index("{")
    return key[start + 1 : key.index("}", start)]


@pytest.mark.parametrize("model", NAMES)
def test_every_key_of_a_model_carries_its_tag(model: str) -> None:
    tags = {hash_tag(key) for key in every_key(model).values()}
    assert len(tags) == 1
    assert all(key.startswith("headrace:{") for key in every_key(model).values())


def test_models_never_share_a_key() -> None:
    made = [key for model in NAMES for key in every_key(model).values()]
    assert len(made) == len(set(made))


def test_the_scripts_keys_are_in_one_place() -> None:
    """As many as lua/ledger.lua gives names to, none twice."""
    found = re.search(
        r"^local ([\w, \n]+) = unpack\(KEYS, 1, (\d+)\)\nlocal OWN_KEYS = (\d+)", (LUA / "ledger.lua").read_text(), re.M
    )
    assert found is not None
    counts = {len(found[1].split(",")), int(found[2]), int(found[3]), len(keys.ledger("m")), len(set(keys.ledger("m")))}
    assert len(counts) == 1
    assert set(keys.ledger("m")) < set(every_key_or_prefix("m"))


def every_key_or_prefix(model: str) -> list[str]:
    """Of functions whose other parameters have defaults: the prefix."""
    made = []
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters.values())
        if parameters and parameters[0].name == "model" and name != "ledger" and all(p.default == "" for p in parameters[1:]):
            made.append(function(model))
    return made


def test_a_slot_is_found_by_the_name_of_its_consumer() -> None:
    assert keys.consumer("12") == "engine-12"
    assert keys.slot_of_consumer(keys.consumer("12")) == "12"


def test_heartbeat_and_marker_of_an_api_server_share_a_tag() -> None:
    assert hash_tag(keys.api("17")) == hash_tag(keys.absent_api("17"))
