"""From a bus URL to a client: one server's, or that of the primary which Sentinels name.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]       rediss://…, with TLS       unix://[USER:PASSWORD@]PATH
    redis+sentinel://[USER:PASSWORD@]HOST1[:PORT],HOST2[:PORT],…/SERVICE[/DB]       rediss+sentinel://…

User and password are the servers'. Those of the Sentinels are `?sentinel_username=…&sentinel_password=…`.
Further parameters are options of the connection, as `ssl_ca_certs`; those that relight rests on are its own.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis.asyncio as redis
from redis.asyncio.connection import parse_url

from relight.events.bus import sentinel
from relight.events.bus.connections import tell_losses
from relight.events.bus.errors import shown
from relight.events.errors import UsageError

SENTINEL_PORT = 26379

_SENTINEL = re.compile(
    r"(?P<scheme>rediss?)\+sentinel://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^@/?#]*)"
    r"/(?P<service>[^/?#]*)(?:/(?P<db>[^/?#]*))?(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:]+)(?::(?P<port>[0-9]{1,5}))?")


class Target(NamedTuple):
    """What a Sentinel URL says."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    of_servers: Mapping[str, Any]
    """Options of connections to the primary."""
    of_sentinels: Mapping[str, Any]
    """Options of connections to Sentinels."""


def client(url: str, **options: Any) -> "redis.Redis":
    """A client that has not connected yet. `options` are ours, above the URL's; raises UsageError."""
    try:
        _refuse_ours(url, options)
        if "+sentinel:" in url.partition("//")[0]:
            target = sentinel_target(url)
            made = sentinel.primary(
                target.sentinels,
                target.service,
                of_servers={**target.of_servers, **options},
                of_sentinels=target.of_sentinels,
            )
        else:
            if not url.startswith("unix:"):
                options["socket_keepalive"] = True
            made = cast("redis.Redis", cast(Any, redis.Redis).from_url(url, **options))
        tell_losses(made)
        cast(Any, made.connection_pool).make_connection()  # options in the URL are looked at here
    except (TypeError, ValueError) as error:
        raise UsageError(f"bus URL {shown(url)!r}: {_without_values(error)}") from None
    return made


def sentinel_target(url: str) -> Target:
    """What `url` (`redis+sentinel://…`) says; raises ValueError, which shows no password."""
    parts = _SENTINEL.fullmatch(url)
    if parts is None:
        raise ValueError("expected redis+sentinel://[USER:PASSWORD@]HOST:PORT,…/SERVICE[/DB]")
    if not parts["service"]:
        raise ValueError("the service is missing: redis+sentinel://HOST:PORT,…/SERVICE[/DB]")
    if not (parts["db"] or "0").isdecimal():
        raise ValueError(f"the database must be a number, not {parts['db']!r}")
    query = dict(parse_qsl(parts["query"] or "", keep_blank_values=True))
    own = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    user = f"{parts['user']}@" if parts["user"] else ""
    # The library takes user, options and TLS apart as it does for one server; the host stands for none.
    of_servers = dict(parse_url(f"{parts['scheme']}://{user}sentinels/{parts['db'] or 0}?{urlencode(query)}"))
    del of_servers["host"]
    if of_servers.pop("connection_class", None) is not None:
        of_servers["ssl"] = True
    of_sentinels = {name: value for name, value in of_servers.items() if name.startswith("ssl")}
    of_sentinels.update({name: value for name, value in own.items() if value})
    return Target(
        tuple(_address(text) for text in parts["hosts"].split(",")),
        unquote(parts["service"]),
        of_servers,
        of_sentinels,
    )


def _address(text: str) -> tuple[str, int]:
    parts = _HOST.fullmatch(text)
    if parts is None or not 0 < int(parts["port"] or SENTINEL_PORT) < 65536:
        raise ValueError(f"{text!r} is no HOST:PORT of a Sentinel")
    return parts["host"].strip("[]"), int(parts["port"] or SENTINEL_PORT)


def _refuse_ours(url: str, options: Mapping[str, Any]) -> None:
    ours = {*options, "retry_on_timeout", "retry_on_error", "single_connection_client"}
    for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name in ours:
            raise ValueError(f"{name} is set by relight and cannot be set in the URL")


def _without_values(error: Exception) -> str:
    """A part of a password may be taken for the port, if a character in it is not percent-encoded."""
    if "Port" in str(error):
        return "the port must be a number (special characters of a password must be percent-encoded)"
    return str(error)
