"""Where the ends of a test are: all on this host, or on hosts of a network of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
from ferry import HERE
from namespaces import Host, Lan


@dataclass(frozen=True)
class Way:
    """How a test's bytes go.

    Attributes:
        scheme: of the transport.
        tls: what UCX may use; empty leaves it to UCX.
        apart: whether the ends are on different hosts.
    """

    scheme: str
    tls: str = ""
    apart: bool = False

    def __str__(self) -> str:
        return "-".join(filter(None, (self.scheme, self.tls, "apart" if self.apart else "")))


def ways(*wanted: Way) -> list[object]:
    """Parameters of the fixture ``way``."""
    made: list[object] = []
    for way in wanted:
        wearing = ((way.scheme == "ucx", pytest.mark.ucx), (way.apart, pytest.mark.apart))
        made.append(pytest.param(way, id=str(way), marks=[mark for worn, mark in wearing if worn]))
    return made


class Sites:
    """This host, and the one that receivers and other processes are made on: the same until spread."""

    def __init__(self) -> None:
        self._near: Host | None = None
        self._far: Host | None = None

    def spread(self, lan: Lan | None) -> None:
        """Be on two hosts of the network; this process was started on "near"."""
        assert lan is not None, "only sessions on such a network have tests that need it"
        self._near, self._far = lan.hosts["near"], lan.hosts["far"]

    @property
    def near_address(self) -> str:
        """Of this host, as the other one knows it."""
        return HERE if self._near is None else self._near.address

    @property
    def far_address(self) -> str:
        """Of the other host."""
        return HERE if self._far is None else self._far.address

    def inside(self) -> AbstractContextManager[None]:
        """On the other host."""
        return nullcontext() if self._far is None else self._far.inside()

    def command(self, *words: str) -> tuple[str, ...]:
        """The command that runs ``words`` on the other host."""
        return words if self._far is None else self._far.command(*words)
