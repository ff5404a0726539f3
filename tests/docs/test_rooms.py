"""`python -m tests.import_rooms` counts the rooms of each house and the arrows between them, and finds circles."""

from __future__ import annotations

from tests.import_rooms import House, houses


def test_floors_and_circles_of_a_small_house() -> None:
    house = House("toy", 5, {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d", "c"}})
    assert (house.num_arrows, house.num_floors) == (6, 3)
    assert house.circles == [{"d", "e"}]


def test_no_house_has_a_circle() -> None:
    found = houses()
    assert [house.name for house in found] == ["api", "engine", "gpu", "kernels", "ops"]
    assert not [house.circles for house in found if house.circles]
    assert all(house.num_files >= len(house.arrows) > 3 for house in found)
