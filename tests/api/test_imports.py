"""The API server stays light: it never loads torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_application_does_not_load_torch() -> None:
    heavy = "{'torch', 'transformers', 'numba'} & sys.modules.keys()"
    code = f"import sys, api.app, api.server; sys.exit(str({heavy}) if {heavy} else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
