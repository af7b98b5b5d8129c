"""Server-sent events as bytes: the page's side of the wire."""

from relight.events import codec

PING = b": still here\n\n"
"""Nothing to say: shows both sides that the connection lives."""

RETRY = b"retry: 1000\n\n"
"""A browser that lost its connection comes back after a second."""


def event(name: str, value: object, *, place: str | None = None) -> bytes:
    """One event; `place` is what a browser names when it comes back."""
    mark = "" if place is None else f"id: {place}\n"
    return f"{mark}event: {name}\ndata: {codec.to_json(value)}\n\n".encode()
