"""Counts the rooms of each house and the imports between them: `python -m tests.import_rooms`.

A room is what lies directly in a house: a package or a file. An arrow goes from a room to a room that it imports. A floor is the
longest way down: a room that imports no other room is on the first. A circle is a set of rooms that import each other in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grimp

HOUSES = ("api", "engine", "gpu", "kernels", "ops")
Arrows = dict[str, set[str]]  # room -> rooms that it imports


@dataclass(frozen=True)
class House:
    name: str
    num_files: int
    arrows: Arrows

    @property
    def num_arrows(self) -> int:
        return sum(map(len, self.arrows.values()))

    @property
    def circles(self) -> list[set[str]]:
        """Largest sets of rooms of which each reaches each other."""
        reach = {room: set(reachable(self.arrows, room)) for room in self.arrows}
        groups = {frozenset({room, *(other for other in reach[room] if room in reach[other])}) for room in self.arrows}
        return [set(group) for group in groups if len(group) > 1]

    @property
    def num_floors(self) -> int:
        """A circle is on one floor."""
        group_of = {room: frozenset(circle) for circle in self.circles for room in circle}
        return max(height(self.arrows, group_of, room) for room in self.arrows)


def reachable(arrows: Arrows, room: str) -> Iterator[str]:
    seen: set[str] = set()
    waiting = [*arrows[room]]
    while waiting:
        if (found := waiting.pop()) not in seen:
            seen.add(found)
            yield found
            waiting += arrows[found]


def height(arrows: Arrows, group_of: dict[str, frozenset[str]], room: str) -> int:
    group = group_of.get(room, frozenset({room}))
    below = {other for member in group for other in arrows[member]} - group
    return 1 + max((height(arrows, group_of, other) for other in below), default=0)


def houses() -> list[House]:
    graph = grimp.build_graph(*HOUSES, cache_dir=None)
    found = []
    for name in HOUSES:
        files = {module for module in graph.modules if module.startswith(f"{name}.") and not graph.find_children(module)}
        packages = {module for module in graph.modules if module.startswith(f"{name}.") and graph.find_children(module)}
        arrows: Arrows = {room_of(module): set() for module in files | packages}
        for module in files | packages:
            for imported in graph.find_modules_directly_imported_by(module):
                if imported.startswith(f"{name}.") and room_of(imported) != room_of(module):
                    arrows[room_of(module)].add(room_of(imported))
        found.append(House(name, len(files), arrows))
    return found


def room_of(module: str) -> str:
    return module.split(".")[1]


def main() -> None:
    print("| house | files | rooms | arrows | floors | circles |\n| --- | --- | --- | --- | --- | --- |")
    for house in houses():
        numbers = (house.num_files, len(house.arrows), house.num_arrows, house.num_floors, len(house.circles))
        print(f"| {house.name} | {' | '.join(map(str, numbers))} |")


if __name__ == "__main__":
    main()
