"""Fills the configuration tree from defaults, a YAML file, the environment and the command line, in this order of rising weight.

Every field of a section in `engine.config` is one setting: `max_model_len` is `--max-model-len` on the command line,
`HEADRACE_MAX_MODEL_LEN` in the environment and `max-model-len` or `max_model_len` in the file. Where a value came from is kept.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ServeConfig
from ops.errors import SettingError

PREFIX = "HEADRACE_"
FILE_VARIABLE = PREFIX + "CONFIG"
OTHER_VARIABLES = frozenset(
    {FILE_VARIABLE, "HEADRACE_CACHE_DIR", "HEADRACE_FAULT_POINT", "HEADRACE_NULL_RUNNER", "HEADRACE_TEST_REDIS_SERVER"}
)

# Kubernetes sets these in every pod for each service of the namespace, here for one named `headrace` or `headrace-NAME`:
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
_SERVICE_VARIABLE = re.compile(r"HEADRACE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")  # the value of HEADRACE_PORT or HEADRACE_NAME_PORT

_COUNT = re.compile(r"(-?\d+)(?:(\.\d+)?([kmgt])|([KMGT]))?(?:i?B)?")  # 2048, 1k = 1000, 2.5k = 2500, 2K = 2048, 4GiB
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Setting:
    """One field of the tree, as command line, environment and file know it."""

    section: str
    name: str
    type: type  # of one value: bool, int, float or str
    repeatable: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    positional: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def _settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for section in dataclasses.fields(ServeConfig):
        section_type = typing.get_type_hints(ServeConfig)[section.name]
        hints = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            hint = hints[field.name]
            if isinstance(hint, types.UnionType):
                hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
            repeatable = typing.get_origin(hint) is list
            if repeatable:
                (hint,) = typing.get_args(hint)
            default = field.default if field.default is not dataclasses.MISSING else typing.cast(Any, field.default_factory)()
            found[field.name] = Setting(
                section=section.name,
                name=field.name,
                type=hint,
                repeatable=repeatable,
                default=default,
                help=field.metadata["help"],
                choices=tuple(field.metadata.get("choices", ())),
                positional=bool(field.metadata.get("positional")),
            )
    return found


SETTINGS: dict[str, Setting] = _settings()


@dataclass
class Resolved:
    """The filled tree, for each setting where its value came from, and the environment variables that are no settings of ours."""

    config: ServeConfig
    sources: dict[str, str]
    ignored: list[str] = dataclasses.field(default_factory=list)

    def get(self, name: str) -> Any:
        return getattr(getattr(self.config, SETTINGS[name].section), name)

    def derive(self, name: str, value: Any, reason: str) -> None:
        """Replace a value that was left open by one that was worked out, and say how."""
        setattr(getattr(self.config, SETTINGS[name].section), name, value)
        self.sources[name] = reason


def resolve(
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    file: str | None = None,
) -> Resolved:
    """`command_line` has parsed values by setting name; `file` (or HEADRACE_CONFIG) names a YAML file. Raises SettingError."""
    resolved = Resolved(ServeConfig(), dict.fromkeys(SETTINGS, "default"))
    resolved.ignored = sorted(name for name, value in environ.items() if _names_a_service(name, value))
    environ = {name: value for name, value in environ.items() if name not in resolved.ignored}
    file = file or environ.get(FILE_VARIABLE)
    if file:
        for name, value in _read_file(Path(file)).items():
            resolved.derive(name, value, f"file {file}")
    for name, value in _read_environment(environ).items():
        resolved.derive(name, value, f"environment {SETTINGS[name].variable}")
    for name, value in command_line.items():
        resolved.derive(name, value, f"command line {SETTINGS[name].flag}")
    return resolved


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise SettingError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError(f"{path} must hold settings as `name: value` lines")
    values: dict[str, Any] = {}
    for key, raw in content.items():
        name = str(key).replace("-", "_")
        if name not in SETTINGS:
            raise SettingError(f"{path}: unknown setting `{key}`{_suggestion(name, SETTINGS)}")
        if name in values:
            raise SettingError(f"{path}: `{name}` is given twice, in kebab case and in snake case")
        if raw is not None:
            values[name] = parse(SETTINGS[name], raw, f"{path}: {key}")
    return values


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {setting.variable: setting for setting in SETTINGS.values()}
    values: dict[str, Any] = {}
    for variable, raw in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in known:
            raise SettingError(f"unknown environment variable {variable}{_suggestion(variable, known)}")
        setting = known[variable]
        if raw:
            values[setting.name] = parse(setting, _split(raw, variable) if setting.repeatable else raw, variable)
    return values


def _names_a_service(variable: str, value: str) -> bool:
    """Whether the variable tells of a service that is called headrace, and is no setting."""
    return bool(
        _SERVICE_VARIABLE.fullmatch(variable)
        or (variable.startswith(PREFIX) and variable.endswith("_PORT") and _SERVICE_URL.fullmatch(value))
    )


def _split(raw: str, origin: str) -> list[str]:
    """A list in one variable: separated by commas, or a JSON array where an item holds a comma."""
    if not raw.startswith("["):
        return [item.strip() for item in raw.split(",") if item.strip()]
    try:
        items = json.loads(raw)
    except ValueError:
        raise SettingError(f"{origin}: not a JSON array") from None
    return [str(item) for item in items]


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def parse(setting: Setting, raw: object, origin: str) -> Any:
    """The typed value of `raw`, which came as text or as a YAML scalar or list. `origin` begins the message of a SettingError."""
    if setting.repeatable:
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        return [_parse_one(setting, item, origin) for item in items]
    return _parse_one(setting, raw, origin)


def _parse_one(setting: Setting, raw: object, origin: str) -> Any:
    if isinstance(raw, (list, dict)):
        raise SettingError(f"{origin}: one value is expected, not a {type(raw).__name__}")
    value: Any
    if setting.type is bool:
        value = _parse_bool(raw, origin)
    elif setting.type is int:
        value = _parse_int(raw, origin)
    elif setting.type is float:
        value = _parse_float(raw, origin)
    else:
        value = str(raw)
    if setting.choices and value not in setting.choices:
        raise SettingError(f"{origin}: `{value}` is not one of {', '.join(setting.choices)}")
    return value


def _parse_bool(raw: object, origin: str) -> bool:
    text = str(raw).lower()
    if text in _TRUE | _FALSE:
        return text in _TRUE
    raise SettingError(f"{origin}: `{raw}` is neither true nor false")


def _parse_int(raw: object, origin: str) -> int:
    match = None if isinstance(raw, (bool, float)) else _COUNT.fullmatch(str(raw).strip())
    if match is None:
        raise SettingError(f"{origin}: `{raw}` is not a whole number; suffixes: k, m, g are powers of 1000, K, M, G of 1024")
    whole, fraction, decimal, binary = match.groups()
    if decimal:
        return round(float(whole + (fraction or "")) * 1000.0 ** _POWERS[decimal])
    return int(whole) * (1 << 10 * _POWERS[binary.lower()] if binary else 1)


def _parse_float(raw: object, origin: str) -> float:
    try:
        value = math.nan if isinstance(raw, bool) else float(str(raw))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SettingError(f"{origin}: `{raw}` is not a number")
    return value


def role_environment(
    config: ServeConfig, sections: Iterable[str], environ: Mapping[str, str], more: Iterable[str] = ()
) -> dict[str, str]:
    """The environment that gives a role's process the values of these sections, and of the settings `more`, and no others.

    The command line would show keys in the process list.
    """
    wanted = {setting.name for setting in SETTINGS.values() if setting.section in set(sections)} | set(more)
    settings_of_ours = {FILE_VARIABLE, *(setting.variable for setting in SETTINGS.values())}
    child = {name: value for name, value in environ.items() if name not in settings_of_ours and not _names_a_service(name, value)}
    for setting in SETTINGS.values():
        value = getattr(getattr(config, setting.section), setting.name)
        if setting.name not in wanted or value == setting.default:
            continue
        child[setting.variable] = json.dumps(value) if setting.repeatable else str(value)
    return child


def shown(name: str, value: Any) -> str | None:
    """The value as it may stand in a log: keys and passwords are left out. None where the setting has no value.

    No text stands for that: `none` is a value of some settings.
    """
    if value is None or value == "" or value == []:
        return None
    if name == "api_key":
        return ", ".join(item.partition("=")[0] + "=***" if "=" in item else "***" for item in value)
    if name == "redis_url":
        return re.sub(r"(sentinel_password=)[^&]*", r"\1***", re.sub(r"//([^:@/]*):.*@", r"//\1:***@", value))
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(resolved: Resolved) -> list[tuple[str, str, str | None, str]]:
    """Rows (section, name, value, source) of the whole tree, in its order; the value as `shown` gives it."""
    return [(s.section, s.name, shown(s.name, resolved.get(s.name)), resolved.sources[s.name]) for s in SETTINGS.values()]
