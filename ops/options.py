"""Command-line options made from the configuration tree, and help that shows them by section."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click

from ops.errors import SettingError
from ops.settings import SETTINGS, Setting, parse

F = TypeVar("F", bound=Callable[..., Any])

TITLES = {
    "model": "Model",
    "cache": "KV cache",
    "parallel": "Parallelism",
    "scheduler": "Scheduler",
    "redis": "Redis",
    "api": "API server",
    "log": "Logs",
}
SHORT = {"tensor_parallel_size": "-tp", "data_parallel_size": "-dp"}  # vLLM's


def _parser(setting: Setting) -> Callable[[str], Any]:
    """Parses as ops.settings does, so that a value means the same on the command line, in the environment and in the file."""

    def convert(value: str) -> Any:
        try:
            parsed = parse(setting, value, setting.flag)
        except SettingError as error:
            raise click.UsageError(str(error)) from None
        return parsed[0] if setting.repeatable else parsed

    return convert


class SettingOption(click.Option):
    """An option that knows its setting, for the grouped help."""

    def __init__(self, setting: Setting) -> None:
        names = [f"{setting.flag}/--no-{setting.flag[2:]}"] if setting.type is bool else [setting.flag]
        if setting.name in SHORT:
            names.append(SHORT[setting.name])
        common: dict[str, Any] = {"default": None, "help": _help(setting)}
        if setting.type is bool:
            super().__init__(names, **common)
        else:
            super().__init__(
                names,
                type=_parser(setting),
                multiple=setting.repeatable,
                metavar="[" + "|".join(setting.choices) + "]" if setting.choices else _metavar(setting),
                **common,
            )
        self.setting = setting

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """A switch that is off by default is shown without its negative, which it takes all the same."""
        record = super().get_help_record(ctx)
        if record is not None and self.setting.type is bool and not self.setting.default:
            return self.opts[0], record[1]
        return record


class SettingsCommand(click.Command):
    """A command whose settings are shown under the title of their section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and not isinstance(p, SettingOption)]
        records = [record for parameter in own if (record := parameter.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)
        for section, title in TITLES.items():
            options = [p for p in self.get_params(ctx) if isinstance(p, SettingOption) and p.setting.section == section]
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def setting_options(sections: Collection[str], more: Collection[str] = ()) -> Callable[[F], F]:
    """Decorator: an option for each setting of these sections or named in `more`; the positional one is an argument too."""

    def decorate(function: F) -> F:
        parameters: list[click.Parameter] = []
        for setting in SETTINGS.values():
            if setting.section not in sections and setting.name not in more:
                continue
            parameters.append(SettingOption(setting))
            if setting.positional:
                parameters.append(click.Argument([f"{setting.name}_argument"], metavar=f"[{setting.name.upper()}]", required=False))
        existing = list(getattr(function, "__click_params__", []))
        function.__click_params__ = [*existing, *reversed(parameters)]  # type: ignore[attr-defined]
        return function

    return decorate


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that the command line has a value for, by name; `values`: the command's parameters."""
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value = values.get(name)
        argument = values.get(f"{name}_argument")
        if argument is not None and value is not None and argument != value:
            raise click.UsageError(f"{setting.name} is given twice: `{argument}` and `{value}`")
        value = argument if value is None else value
        if setting.repeatable and value is not None:
            value = list(value) or None
        if value is not None:
            found[name] = value
    return found


def _metavar(setting: Setting) -> str:
    return {int: "N", float: "X"}.get(setting.type, "TEXT")


def _help(setting: Setting) -> str:
    if setting.type is bool and setting.default:
        return f"{setting.help}; on by default"
    if setting.default in (None, "", [], False):
        return setting.help
    return f"{setting.help}; default: {setting.default}"
