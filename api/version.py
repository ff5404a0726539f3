"""The name and version of this server."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("headrace")
except PackageNotFoundError:  # run from a checkout that was not installed
    VERSION = "0.0.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """`system_fingerprint` of answers: changes when the server or the model does."""
    return f"headrace-{VERSION}-{model_fingerprint}"
