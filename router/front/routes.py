"""Which handler answers which method and path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

H = TypeVar("H")


@dataclass(frozen=True)
class Found(Generic[H]):
    """The handler of a request, and the rest of the path where the route ends with a slash."""

    handler: H
    rest: str = ""


@dataclass(frozen=True)
class WrongMethod:
    """The path is known; these are the methods it answers."""

    allowed: tuple[str, ...]


class RouteTable(Generic[H]):
    """Handlers by method and path.

    Args:
        routes: ``{path: {method: handler}}``; a path that ends with a slash answers everything below it, but the root
            answers for itself alone.
    """

    def __init__(self, routes: Mapping[str, Mapping[str, H]]) -> None:
        self._exact: dict[str, dict[str, H]] = {}
        self._below: dict[str, dict[str, H]] = {}
        for path, methods in routes.items():
            table = self._below if path.endswith("/") and path != "/" else self._exact
            table[path] = dict(methods)

    def find(self, method: str, path: str) -> Found[H] | WrongMethod | None:
        """The handler, or why there is none; HEAD is answered as GET."""
        methods, rest = self._lookup(path)
        if methods is None:
            return None
        handler = methods.get("GET" if method == "HEAD" else method)
        return WrongMethod(tuple(methods)) if handler is None else Found(handler, rest)

    def _lookup(self, path: str) -> tuple[dict[str, H] | None, str]:
        if path in self._exact:
            return self._exact[path], ""
        for prefix, methods in self._below.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, path[len(prefix) :]
        return None, ""
