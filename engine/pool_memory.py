"""How much memory a pool takes, as people say it: an amount, or a share of what is free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.layout import KVLayout

_SAID = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?(%|[KMGT]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FIELD = "pool_memory"


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """An amount of memory, or a share of what a device has free when the weights are there; one of the two is 0.

    Attributes:
        nbytes: the amount.
        share: in (0, 1].
    """

    nbytes: int
    share: float

    @classmethod
    def parse(cls, said: object) -> PoolMemory:
        """What ``said`` says: "512MiB", "1.5 GiB" or "60%".

        Raises:
            ConfigError: it says nothing of that kind; names the value.
        """
        found = _SAID.fullmatch(said) if isinstance(said, str) else None
        number, unit = (float(found[1]), found[2]) if found else (0.0, "")
        if number <= 0 or (unit == "%" and number > 100):
            wanted = "an amount such as 512MiB or 8GiB, or a share of the free memory up to 100%"
            raise ConfigError(f"{_FIELD} must be {wanted}, got {said!r}", field=_FIELD)
        return cls(0, number / 100) if unit == "%" else cls(int(number * _UNITS[unit]), 0.0)

    def blocks(self, layout: KVLayout, free: int) -> int:
        """Blocks of ``layout`` that it holds, the reserved one included.

        Args:
            layout: of the pool.
            free: bytes that the device has free.

        Raises:
            ConfigError: they are fewer than two, or more than fit what is free; names the bytes.
        """
        nbytes = self.nbytes or int(self.share * free)
        count = nbytes // layout.block_bytes
        if count < 2:
            raise ConfigError(
                f"{_FIELD} comes to {nbytes} bytes, and holds {count} blocks of {layout.block_bytes}; "
                "at least 2 are needed (one is reserved)",
                field=_FIELD,
            )
        if nbytes > free:
            raise ConfigError(f"{_FIELD} comes to {nbytes} bytes, and the device has {free} free", field=_FIELD)
        return count
