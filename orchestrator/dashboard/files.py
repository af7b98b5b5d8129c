"""The page itself: files of this package, read once, and sent anew only where they have changed."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

from aiohttp import web

TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}


class File(NamedTuple):
    """One of them."""

    body: bytes
    type: str
    tag: str


def load() -> Mapping[str, File]:
    """All of them, by name."""
    found: dict[str, File] = {}
    for path in (files(__package__ or "") / "page").iterdir():
        kind = TYPES.get(path.name.rpartition(".")[2])
        if kind is not None:
            body = path.read_bytes()
            found[path.name] = File(body, kind, hashlib.sha256(body).hexdigest()[:16])
    return found


def answer(request: web.Request, file: File) -> web.Response:
    """The file, or that the browser has it."""
    headers = {"ETag": f'"{file.tag}"', "Cache-Control": "no-cache"}
    if any(tag.value == file.tag for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, content_type=file.type, charset="utf-8", headers=headers)
