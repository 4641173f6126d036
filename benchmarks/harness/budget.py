"""Wall-time budget of a command, split among its parts."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Budget:
    """Time budget of ``seconds`` from now on."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", self.clock())

    @property
    def spent(self) -> float:
        """Seconds since the start of the budget."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds until the end of the budget; never negative."""
        return max(0.0, self.seconds - self.spent)

    def part(self, seconds: float) -> "Budget":
        """Returns a budget of ``seconds``, at most the remaining time."""
        return Budget(min(seconds, self.left), self.clock)
