"""Files, names, commands, options and links that the documents mention exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from ops.cli import cli
from ops.settings import OTHER_VARIABLES, SETTINGS
from tests.docs.prose import ROOT, documents

TREES = ("api", "benchmarks", "docs", "engine", "gpu", "kernels", "ops", "tests")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"({'|'.join(TREES)})/[\w./-]*")
_DOTTED = re.compile(rf"({'|'.join(TREES)})(\.\w+)+")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OPTION = re.compile(r"--[a-z][a-z-]+")
_COMMAND = re.compile(r"(?:\$ )?(?:\.venv/bin/)?headrace ([a-z][\w-]*)")


@pytest.fixture(params=documents(), ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_paths_exist(document: Path) -> None:
    paths = [code for code in code_of(document) if _PATH.fullmatch(code)]
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_dotted_names_exist(document: Path) -> None:
    names = [code for code in code_of(document) if _DOTTED.fullmatch(code) and not (ROOT / code).exists()]
    assert not [name for name in names if not exists(name)]


def test_names_stand_in_the_file_that_their_row_gives(document: Path) -> None:
    rows = [row for row in document.read_text().splitlines() if row.startswith("|")]
    told = [(path, name) for row in rows for path, names in names_by_file(row) for name in names]
    assert not [(path, name) for path, name in told if name not in defined(path)]


def test_links_lead_somewhere(document: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", document.read_text())):
        if not re.match(r"https?:", target):
            path, _, anchor = target.partition("#")
            found = (document.parent / path).resolve() if path else document
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


def test_commands_and_options_exist(document: Path) -> None:
    known = {option for command in cli.commands.values() for option in options(command)}
    for code in (*code_of(document), *lines_of(document)):
        if use := _COMMAND.match(code):
            command = cli.get_command(click.Context(cli), use[1])
            assert command, code
            assert not set(_OPTION.findall(code.partition("#")[0])) - options(command), code
        elif use := re.search(r"python -m ([\w.]+)", code):
            assert exists(use[1]) or use[1] in ("pytest", "pstats"), code
        elif use := re.match(r"make ([\w-]+)", code):
            assert f"\n{use[1]}:" in MAKEFILE, code
        elif code.startswith("--"):
            assert not set(_OPTION.findall(code)) - known - FOREIGN_OPTIONS.get(document.name, set()), code
        elif use := re.match(r"HEADRACE_\w+", code):
            assert use[0] in VARIABLES, code


# Options of other commands, which the text around them names.
FOREIGN_OPTIONS = {
    "benchmarks.md": {"--only", "--tokens", "--requests", "--seconds", "--rounds", "--device", "--units", "--headrace"},
    "docker.md": {"--volumes"},
    "README.md": {"--migration-limit"},
}
MAKEFILE = (ROOT / "Makefile").read_text()
COMPOSE_VARIABLES = set(re.findall(r"HEADRACE_\w+", (ROOT / "compose.yaml").read_text()))
VARIABLES = (
    {setting.variable for setting in SETTINGS.values()} | OTHER_VARIABLES | COMPOSE_VARIABLES | {"HEADRACE_SERVICE_HOST"}
)  # Kubernetes'


def test_names_are_found_in_rows_and_modules() -> None:
    assert names_by_file("| `Sampler` | `gpu/sampler.py` | `Sampler` | also `Rules` in `gpu/rules.py` |") == [
        ("gpu/sampler.py", ["Sampler"]),
        ("gpu/rules.py", ["Rules"]),
    ]
    assert exists("ops.requests.abort") and exists("engine.client.client.AsyncClient.abort") and not exists("ops.requests.abbot")


def code_of(document: Path) -> list[str]:
    return _CODE.findall(_FENCE.sub("", document.read_text()))


def lines_of(document: Path) -> list[str]:
    """The lines of fenced code, as they are typed."""
    return [line.strip() for block in _FENCE.findall(document.read_text()) for line in block.splitlines()[1:-1]]


def names_by_file(row: str) -> list[tuple[str, list[str]]]:
    """Of a table's row `| theirs | file | names | more |`: the names of that file, and of `name` in `file` behind them."""
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    if len(cells) < 3 or not (path := re.fullmatch(r"`([\w/]+\.py)`", cells[1])):
        return []
    more = re.findall(r"`(\w+)` in `([\w/]+\.py)`", " ".join(cells[3:]))
    return [(path[1], _CODE.findall(cells[2])), *((file, [name]) for name, file in more)]


@cache
def defined(path: str) -> frozenset[str]:
    """Classes, functions and assigned names of a file's top level, and methods as `Class.method`."""
    return frozenset(_definitions(ast.parse((ROOT / path).read_text()).body))


def _definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def exists(dotted: str) -> bool:
    """Whether a module, or a name in one, has this dotted name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        if base.is_dir() and length == len(parts):
            return True
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if file.exists():
            return length == len(parts) or ".".join(parts[length:]) in defined(str(file.relative_to(ROOT)))
    return False


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
