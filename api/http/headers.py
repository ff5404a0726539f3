"""A request's headers as ASGI has them: a short list, of which a request needs one or two."""

from __future__ import annotations

from starlette.types import Scope

JSON_TYPE = "application/json"


def header(scope: Scope, name: bytes) -> str | None:
    """The first header called `name`, in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def media_type(scope: Scope) -> str:
    """The media type of the body, in lower case, without parameters; "" if the request does not name it."""
    return (header(scope, b"content-type") or "").partition(";")[0].strip().lower()


def route_path(scope: Scope) -> str:
    """The path as routes know it: without --root-path, where a proxy has left that in front of it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
