"""Errors of the model house that other houses show to people. Torch-free."""

from __future__ import annotations


class CheckpointError(Exception):
    """A model path cannot be served; the message is one sentence that says why and, where there is one, what to do."""


class UnsupportedConfiguration(ValueError):
    """Options that cannot work on this machine or together; the message is one sentence that names them and says why."""
