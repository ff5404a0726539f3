"""Keys: each model has one hash tag, whatever its name, and each meaning one key."""

from __future__ import annotations

import inspect

import pytest

from engine.bus import keys

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
    assert len(set(keys.ledger("m"))) == 14
    assert set(keys.ledger("m")) == {
        keys.requests("m"), keys.order("m"), keys.live("m"), keys.ended("m"), keys.load("m"), keys.usage("m"),
        keys.record("m"), keys.external("m"), keys.tombstone("m"), keys.resume("m"), keys.orphans("m"), keys.output("m"),
        keys.kept("m"), keys.externals("m"),
    }  # fmt: skip


def test_a_slot_is_found_by_the_name_of_its_consumer() -> None:
    assert keys.consumer("12") == "engine-12"
    assert keys.slot_of_consumer(keys.consumer("12")) == "12"


def test_heartbeat_and_marker_of_an_api_server_share_a_tag() -> None:
    assert hash_tag(keys.api("17")) == hash_tag(keys.absent_api("17"))
