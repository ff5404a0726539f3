"""Settings that are wrong with any model are refused before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import ServeConfig
from ops.errors import SettingError
from ops.prepare import check


@pytest.mark.parametrize(
    ("load_format", "script", "why"),
    [
        ("scripted", None, "--load-format scripted and --script FILE go together"),
        ("auto", "- answer: a", "--load-format scripted and --script FILE go together"),
        ("scripted", "- anwser: a", r"script\.yaml is no list of rules: Object contains unknown field `anwser`"),
        ("scripted", "- answer: a", None),
    ],
)
def test_a_script_is_checked(tmp_path: Path, load_format: str, script: str | None, why: str | None) -> None:
    config = ServeConfig()
    config.model.model, config.model.load_format = "demo", load_format
    if script is not None:
        config.model.script = str(tmp_path / "script.yaml")
        (tmp_path / "script.yaml").write_text(script)
    if why is None:
        check(config)
    else:
        with pytest.raises(SettingError, match=why):
            check(config)
