"""--redis-url, read once for its two readers: redis-py, which the bus uses, and kombu, which Celery uses.

Both read URLs by rules of their own. So the URL is checked here, and each reader gets one that both understand alike: it is
percent-encoded and names host, port, database and certificate checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit

from ops.errors import SettingError

DEFAULT_PORT = 6379
CERTIFICATE_CHECKS = ("required", "optional", "none")
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS = ("ssl_cert_reqs", "ssl_check_hostname", *FILES)
ENCODE = "in a user name or password write `/` as %2F, `?` as %3F, `#` as %23, `[` as %5B and `%` as %25"


@dataclass(frozen=True)
class RedisUrl:
    """`str` gives the URL for redis-py; `broker` the one for Celery."""

    scheme: str  # "redis", "rediss" or "unix"
    credentials: str  # "", "user@", ":password@" or "user:password@", percent-encoded
    address: str  # host and port, or the path of the socket, percent-encoded
    database: int
    tls: tuple[tuple[str, str], ...] = ()  # options of redis-py, of a rediss URL

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.credentials}{self.address}?db={self.database}"
        options = "?" + urlencode(self.tls) if self.tls else ""
        return f"{self.scheme}://{self.credentials}{self.address}/{self.database}{options}"

    @property
    def broker(self) -> str:
        """The same server and database as kombu spells them: it knows a unix socket by another scheme."""
        if self.scheme == "unix":
            return f"redis+socket://{self.credentials}{self.address}?virtual_host={self.database}"
        return str(self)


def parse_redis_url(text: str) -> RedisUrl:
    """Raises SettingError, which never shows a part of the text that may be of a password."""
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        raise _refusal(f"the host is malformed; {ENCODE}") from None
    if parts.scheme not in ("redis", "rediss", "unix") or not text.strip()[len(parts.scheme) :].startswith("://"):
        raise _refusal("it must begin with redis://, rediss:// (TLS) or unix:// (a socket's path)")
    if parts.fragment or "@" in parts.path + parts.query:
        raise _refusal(ENCODE)
    options = _options(parts)
    database = _database(parts, options)
    tls = _tls(options) if parts.scheme == "rediss" else ()
    return RedisUrl(parts.scheme, _credentials(parts), _address(parts), database, tls)


def _refusal(reason: str) -> SettingError:
    return SettingError(f"--redis-url: {reason}")


def _options(parts: SplitResult) -> dict[str, str]:
    known = ("db", *TLS_OPTIONS) if parts.scheme == "rediss" else ("db",)
    given = parse_qs(parts.query, keep_blank_values=True)
    if any(name not in known or len(values) != 1 for name, values in given.items()):
        raise _refusal(f"after `?` it takes {', '.join(known)}, each once")
    return {name: values[0] for name, values in given.items()}


def _database(parts: SplitResult, options: dict[str, str]) -> int:
    by_path = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    named = {text for text in (by_path, options.get("db", "")) if text}
    if len(named) > 1 or not all(text.isascii() and text.isdigit() for text in named) or options.get("db") == "":
        raise _refusal("the database is one number from 0 on: redis://host:6379/3")
    return int(named.pop()) if named else 0


def _credentials(parts: SplitResult) -> str:
    user, password = (quote(unquote(text or ""), safe="") for text in (parts.username, parts.password))
    return f"{user}:{password}@" if password else f"{user}@" if user else ""


def _address(parts: SplitResult) -> str:
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.startswith("/") or parts.path == "/":
            raise _refusal("a socket is named by its whole path: unix:///run/redis.sock?db=3")
        return quote(unquote(parts.path))
    try:
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise _refusal(f"the port is not a number from 1 to 65535; {ENCODE}")
    host = unquote(parts.hostname or "localhost")
    return f"[{host}]:{port}" if ":" in host else f"{quote(host)}:{port}"


def _tls(options: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Certificates are checked unless the URL says otherwise."""
    checks = options.get("ssl_cert_reqs", "required")
    if checks not in CERTIFICATE_CHECKS:
        raise _refusal(f"ssl_cert_reqs is one of {', '.join(CERTIFICATE_CHECKS)}")
    hostname = options.get("ssl_check_hostname", "false" if checks == "none" else "true").lower()
    if hostname not in ("true", "false"):
        raise _refusal("ssl_check_hostname is true or false")
    files = [(name, options[name]) for name in FILES if name in options]
    for name, file in files:
        if not Path(file).is_file():
            raise _refusal(f"{name}: there is no file {file}")
    return (("ssl_cert_reqs", checks), ("ssl_check_hostname", hostname), *files)
