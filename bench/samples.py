"""What a driver says: one sample of one side of one question."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sample:
    """One figure. `side` is "encfsd" or what it is compared with in the same round."""

    question: str
    side: str
    round: int
    unit: str
    value: float

    @property
    def is_speed(self) -> bool:
        """More is better."""
        return self.unit.endswith("/s")
