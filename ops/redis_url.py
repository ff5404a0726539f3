"""--redis-url, read once for its two readers: redis-py, which the bus uses, and kombu, which Celery uses.

Both read URLs by rules of their own. So the URL is checked here, and each reader gets one that both understand alike: it is
percent-encoded and names host, port, database and certificate checks. With Sentinels in place of the host, each reader has its own
scheme too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit

from engine.bus.sentinel_url import SentinelUrl
from ops.errors import SettingError

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
SERVICE_NAME = re.compile(r"[\w.-]+", re.ASCII)  # as Sentinels allow it
CERTIFICATE_CHECKS = ("required", "optional", "none")
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS = ("ssl_cert_reqs", "ssl_check_hostname", *FILES)
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
ENCODE = "in a user name or password write `/` as %2F, `?` as %3F, `#` as %23, `[` as %5B and `%` as %25"


@dataclass(frozen=True)
class RedisUrl:
    """`str` gives the URL for the bus; `broker` and `broker_options` are Celery's."""

    scheme: str  # one of SCHEMES
    credentials: str  # "", "user@", ":password@" or "user:password@", percent-encoded
    address: str  # host and port, those of each Sentinel with commas between, or the path of the socket, percent-encoded
    database: int
    tls: tuple[tuple[str, str], ...] = ()  # options of redis-py, where the scheme is one with TLS
    service: str = ""  # the name that Sentinels know the master by
    of_sentinels: tuple[tuple[str, str], ...] = ()  # user and password of the Sentinels, by SENTINEL_OPTIONS

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.credentials}{self.address}?db={self.database}"
        path = f"{self.service}/{self.database}" if self.service else str(self.database)
        return f"{self.scheme}://{self.credentials}{self.address}/{path}{_query(self.tls + self.of_sentinels)}"

    @property
    def broker(self) -> str:
        """The same server and database as kombu spells them: it knows a unix socket, and Sentinels, by other schemes."""
        if self.scheme == "unix":
            return f"redis+socket://{self.credentials}{self.address}?virtual_host={self.database}"
        if self.service:
            rest = f"/{self.database}{_query(self.tls)}"
            return ";".join(f"sentinel://{self.credentials}{address}{rest}" for address in self.address.split(","))
        return str(self)

    @property
    def broker_options(self) -> dict[str, Any]:
        """kombu's transport options that belong to `broker`."""
        if not self.service:
            return {}
        named = SentinelUrl.parse(str(self))
        return {"master_name": named.service, "sentinel_kwargs": named.sentinel_options}


def _query(options: tuple[tuple[str, str], ...]) -> str:
    return "?" + urlencode(options) if options else ""


def parse_redis_url(text: str) -> RedisUrl:
    """Raises SettingError, which never shows a part of the text that may be of a password."""
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        raise _refusal(f"the host is malformed; {ENCODE}") from None
    if parts.scheme not in SCHEMES or not text.strip()[len(parts.scheme) :].startswith("://"):
        raise _refusal("it must begin with redis://, rediss:// (TLS), unix:// (a socket's path) or redis+sentinel://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise _refusal(ENCODE)
    options = _options(parts)
    tls = _tls(options) if parts.scheme.startswith("rediss") else ()
    if not _is_of_sentinels(parts):
        return RedisUrl(parts.scheme, _credentials(parts), _address(parts), _database(parts, options), tls)
    service, parts = _service(parts)
    of_sentinels = tuple((name, options[name]) for name in SENTINEL_OPTIONS if options.get(name))
    database = _database(parts, options)
    return RedisUrl(parts.scheme, _credentials(parts), _sentinels(parts), database, tls, service, of_sentinels)


def _refusal(reason: str) -> SettingError:
    return SettingError(f"--redis-url: {reason}")


def _options(parts: SplitResult) -> dict[str, str]:
    known = ("db", *(TLS_OPTIONS if parts.scheme.startswith("rediss") else ()))
    if _is_of_sentinels(parts):
        known += SENTINEL_OPTIONS
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


def _is_of_sentinels(parts: SplitResult) -> bool:
    return parts.scheme.endswith("+sentinel")


def _service(parts: SplitResult) -> tuple[str, SplitResult]:
    """The master's name, which stands before the database; and the URL without it."""
    name, _, rest = parts.path.strip("/").partition("/")
    if not SERVICE_NAME.fullmatch(unquote(name)):
        raise _refusal("behind the Sentinels comes the name of their master: redis+sentinel://host1:26379,host2:26379/mymaster/0")
    return unquote(name), parts._replace(path=f"/{rest}")


def _sentinels(parts: SplitResult) -> str:
    hosts = parts.netloc.rpartition("@")[2]
    if not all(hosts.split(",")):
        raise _refusal("Sentinels are named with commas between: redis+sentinel://host1:26379,host2:26379/mymaster/0")
    return ",".join(_address(parts._replace(netloc=host), SENTINEL_PORT) for host in hosts.split(","))


def _address(parts: SplitResult, default_port: int = DEFAULT_PORT) -> str:
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.startswith("/") or parts.path == "/":
            raise _refusal("a socket is named by its whole path: unix:///run/redis.sock?db=3")
        return quote(unquote(parts.path))
    try:
        port = default_port if parts.port is None else parts.port
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
