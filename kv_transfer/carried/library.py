"""Which of the libraries are here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Library:
    """A library that carries KV, by any of several modules of one surface.

    Attributes:
        scheme: of the transport.
        modules: that will do, best first.
        extra: of kvferry that installs it.
    """

    scheme: str
    modules: tuple[str, ...]
    extra: str

    def found(self) -> str | None:
        """The module to use; None where there is none."""
        return next((name for name in self.modules if find_spec(name) is not None), None)

    def require(self) -> str:
        """The module to use.

        Raises:
            ConfigError: there is none; says how to get it.
        """
        name = self.found()
        if name is None:
            raise ConfigError(f"the {self.scheme} transport is not usable: {self._missing()}", field="transport")
        return name

    def why_unusable(self) -> str | None:
        """What is missing; None where nothing is."""
        return None if self.found() is not None else self._missing()

    def describe(self, proof: str) -> str:
        """One line for people: whether it is usable, what it is, and with ``proof`` what is proved and what is not."""
        name = self.found()
        if name is None:
            return f"{self.scheme}: not usable: {self._missing()}"
        # One module may come with packages of several names, one per CUDA release.
        packages = metadata.packages_distributions().get(name, [name])
        return f"{self.scheme}: {packages[0]} {_version(packages[0])}; {proof}"

    def _missing(self) -> str:
        names = " nor ".join(self.modules)
        return f"neither {names} is installed (pip install 'kvferry[{self.extra}]')"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


NIXL = Library("nixl", ("nixl_cu12", "nixl_cu13", "nixl"), "nixl")
UCXX = Library("ucxx", ("ucxx", "ucp"), "ucxx")
LIBRARIES = {library.scheme: library for library in (NIXL, UCXX)}
