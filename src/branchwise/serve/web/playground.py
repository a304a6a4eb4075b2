"""The playground: a static page at / that shows how texts come about. It uses the same paths as every client."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_pages(app: FastAPI) -> None:
    """Add a path for every file of the page. The page is open to all, and asks for a key if the server wants one."""
    for file in (files("branchwise.serve") / "page").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            _add(app, "/" if file.name == "index.html" else f"/{file.name}", file.read_bytes(), kind)


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)
