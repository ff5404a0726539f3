"""Pictures in the documents are what their scripts make."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree

import pytest

from tests.docs.prose import ROOT

PICTURES = ROOT / "docs/pictures"


def test_the_architecture_is_as_its_script_draws_it() -> None:
    assert (PICTURES / "architecture.svg").read_text() == runpy.run_path(str(PICTURES / "architecture.py"))["svg"]()


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_small_and_need_nothing_from_elsewhere(path) -> None:
    assert path.stat().st_size < 40_000
    xml.etree.ElementTree.parse(path)
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "url(http" not in text and "href" not in text
