"""What is known of one prompt's log-probabilities, put together over the attempts of its request.

Life cycle: :meth:`PromptRecord.add` for each piece, until nothing is wanted any more; then :meth:`PromptRecord.take`.
"""

from __future__ import annotations

from protocol.prompt_logprobs import LogprobTable


class PromptRecord:
    """Tables of one prompt's tokens, without a gap.

    Args:
        alternatives: wanted beside each token's own log-probability; None wants nothing.
        length: tokens of the prompt.

    Attributes:
        next: index of the first token that nothing is known of; token 0 has no log-probability.
    """

    def __init__(self, alternatives: int | None, length: int) -> None:
        self._alternatives = alternatives
        self._length = length
        self._tables: list[LogprobTable] = []
        self.next = 1

    @property
    def wanted(self) -> int | None:
        """Alternatives that are wanted for the tokens from ``next`` on; None when all is known."""
        return self._alternatives if self.next < self._length else None

    def add(self, start: int, table: LogprobTable) -> bool:
        """Take in what was told from token ``start`` on; False when something between is missing, or it is too much."""
        if self._alternatives is None or start < self.next:
            return True  # nobody asked for it, or it came twice
        if start > self.next or start + len(table) > self._length:
            return False
        self._tables.append(table)
        self.next += len(table)
        return True

    def take(self) -> tuple[LogprobTable, ...]:
        """All that came since the last call."""
        taken, self._tables = tuple(self._tables), []
        return taken
