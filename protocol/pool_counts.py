"""How many blocks of a pool are in which state."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PoolCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one pool by state; ``leaked`` must read 0."""

    free: Count
    active: Count
    cached: Count
    exported: Count
    importing: Count
    draining: Count
    reserved: Count
    total: Count

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.active + self.exported + self.importing + self.draining

    @property
    def leaked(self) -> int:
        """Blocks that no state accounts for (negative: counted twice)."""
        return self.total - self.reserved - self.free - self.cached - self.used
