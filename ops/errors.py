"""Errors that a command shows to its user in one line, without a traceback."""

from __future__ import annotations

import os


class CommandError(Exception):
    """A command cannot go on, for a reason that its user can mend. The message is the line that is shown."""

    exit_code = 1


class SettingError(CommandError):
    """A setting is unknown, malformed or contradicts another. Exits with EX_CONFIG, which a supervisor does not retry."""

    exit_code = os.EX_CONFIG
