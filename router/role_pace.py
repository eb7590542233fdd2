"""What steps take, role by role: one line for all workers of a role, and how much slower than it each of them is.

A worker's own line says little of its slope: where its steps have all been alike there is none to be seen. Two equal
workers would differ by what each happened to see, and the one whose line is the flatter would get everything. So the
slope is the role's, and a worker's own line counts only where it was measured.

Life cycle of a role's line: assumed, taken from the first worker that tells one, mixed with each further one, and given
out anew when the mixture has moved. In between all reckon with the same line, or equals would differ again.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Role

Line = tuple[float, float]
"""Seconds of a step, and of each token in it."""

ASSUMED: dict[Role, Line] = {"prefill": (0.0, 2e-4), "decode": (2e-2, 1e-3)}
"""Where nobody of a role has measured any."""
LEAST_GAIN = 1 / 64
"""Weight of one more line among those there were, when there were many."""
MOVED = 0.02
"""Share of a step's time by which the mixture is away from the line that was given out when it is given out anew."""
OUTLIER = 2.0
"""How much slower, or faster, than its role a worker counts for the role's line at most."""


@dataclass(slots=True)
class RolePace:
    """The line of one role.

    Attributes:
        line: of it, as given out.
        mixed: of all that was told.
        told: lines that this is made of.
    """

    line: Line
    mixed: Line = (0.0, 0.0)
    told: int = 0

    def slowness(self, own: Line, tokens: float) -> float:
        """How many times as long as the role's a worker's step of so many tokens takes."""
        usual = seconds(self.line, tokens)
        return seconds(own, tokens) / usual if usual > 0.0 else 1.0

    def hear(self, own: Line, tokens: float) -> bool:
        """A worker has told the line that it has measured with steps of so many tokens in the mean.

        Returns:
            Whether the role's line is another one now.
        """
        self.told += 1
        if self.told == 1:
            self.mixed = own
        else:
            gain = max(LEAST_GAIN, 1.0 / self.told)
            usual, off = seconds(self.mixed, tokens), seconds(own, tokens)
            within = min(max(off, usual / OUTLIER), usual * OUTLIER) / off if off > 0.0 else 1.0
            fixed, per_token = self.mixed
            self.mixed = fixed + gain * (within * own[0] - fixed), per_token + gain * (within * own[1] - per_token)
        bound = MOVED * seconds(self.line, tokens)
        if self.told > 1 and all(abs(seconds(self.mixed, x) - seconds(self.line, x)) <= bound for x in (0.0, tokens)):
            return False
        self.line = self.mixed
        return True


def seconds(line: Line, tokens: float) -> float:
    """Of a step of so many tokens."""
    return line[0] + line[1] * tokens
