"""Between the client library's errors and ours: what is worth another try, and what is a bug."""

import re
from collections.abc import Generator
from contextlib import contextmanager

from redis import exceptions

from relight.events.errors import BusUnavailable

_CANNOT_SERVE_NOW = (
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOAUTH",
    "NOPERM",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "UNBLOCKED",
    "WRONGPASS",
)


_PASSWORD = re.compile(r"(//[^:/?#]*:)[^/?#]*@")
"""By itself, since a URL that cannot be taken apart is shown too."""


def shown(url: str) -> str:
    """`url` without its password, for messages."""
    return _PASSWORD.sub(r"\1***@", url, count=1)


@contextmanager
def translated(url: str) -> Generator[None]:
    """Raise BusUnavailable for whatever says that the server cannot be reached or cannot serve now."""
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise BusUnavailable(f"bus {shown(url)} cannot be reached: {error}") from error
    except (exceptions.OutOfMemoryError, exceptions.ReadOnlyError, exceptions.NoPermissionError) as error:
        raise BusUnavailable(f"bus {shown(url)} cannot serve: {error}") from error
    except exceptions.ResponseError as error:
        if str(error).lstrip("-").startswith(_CANNOT_SERVE_NOW):
            raise BusUnavailable(f"bus {shown(url)} cannot serve: {error}") from error
        raise
