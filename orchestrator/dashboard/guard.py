"""What every answer carries, and which requests get none.

Nothing here changes anything: every method but GET and HEAD is refused. The page may load nothing from
elsewhere, run nothing inline, and stand in no frame. A page of another site cannot read this one, also not
under a name that it has made point here: `Host` must be an address, or a name that this process knows.
"""

import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from relight.events import codec
from relight.events.errors import BusUnavailable, RelightError, UsageError
from relight.orchestrator.dashboard.hub import TooMany

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Server": "relight",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

READ_ONLY = (
    "this page changes nothing, it answers GET and HEAD alone; say what you want with `relight restart`,"
    " `drain`, `release`, `retire`, `hold` or `approve`"
)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def told(status: int, error: str, **headers: str) -> web.Response:
    """An answer that says what is wrong."""
    return as_json({"error": error}, status=status, headers=headers)


def as_json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        text=codec.to_json(value) + "\n",
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )


def known_names(host: str, allowed: Iterable[str]) -> frozenset[str]:
    """The names under which this process may be asked: `localhost`, the machine's, and what it was told."""
    names = {"localhost", host, socket.gethostname(), *allowed}
    return frozenset(name.rstrip(".").lower() for name in names)


def is_known(host: str | None, names: frozenset[str]) -> bool:
    """Whether a `Host` header is an address or one of `names`; its port does not matter. None: no browser."""
    if host is None:
        return True
    name = host.rpartition(":")[0] if _has_port(host) else host
    name = name.rstrip(".").lower()
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name in names
    return True


def _has_port(host: str) -> bool:
    return ":" in host and not host.endswith("]")


def guarding(names: frozenset[str]) -> Middleware:
    """What stands before every route."""

    @web.middleware
    async def guard(request: web.Request, handler: Answer) -> web.StreamResponse:
        refused = _refused(request, names)
        return await _answered(request, handler) if refused is None else refused

    return guard


def _refused(request: web.Request, names: frozenset[str]) -> web.Response | None:
    host = request.headers.get("Host")
    if not is_known(host, names):
        return told(421, f"this is not {host!r}: name it with --allow-host where that is wanted")
    if request.method not in ("GET", "HEAD"):
        return told(405, READ_ONLY, Allow="GET, HEAD")
    if request.headers.get("Sec-Fetch-Site") == "cross-site" and request.path.startswith("/api/"):
        return told(403, "pages of other sites get nothing from here")
    return None


async def _answered(request: web.Request, answer: Answer) -> web.StreamResponse:
    try:
        return await answer(request)
    except web.HTTPException as error:
        return told(error.status, f"{request.path}: {error.reason}")
    except BusUnavailable as error:
        return told(503, str(error))
    except TooMany as error:
        return told(503, str(error))
    except UsageError as error:
        return told(404, str(error))
    except RelightError as error:
        return told(500, str(error))


async def with_headers(_: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`."""
    response.headers.update(HEADERS)
