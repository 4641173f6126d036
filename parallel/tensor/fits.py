"""Numbers that the tensor ranks have to share, and the sentence for one that they cannot."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import PlanError


@dataclass(frozen=True, slots=True)
class Fit:
    """A number that the tensor ranks have to share."""

    owner: str
    noun: str
    count: int
    rule: str = "divide"
    """divide: in equal shares; share: or each held by several ranks; rows: at least one each."""

    def allows(self, tp: int) -> bool:
        """Whether this number goes with ``tp`` ranks."""
        if self.rule == "rows":
            return self.count >= tp
        return self.count % tp == 0 or (self.rule == "share" and tp % self.count == 0)

    def complaint(self, tp: int) -> str:
        """What is wrong with ``tp`` ranks."""
        verb = {"divide": "does not divide", "share": "neither divides nor is a multiple of", "rows": "is more than"}
        return f"tensor = {tp} {verb[self.rule]} the {self.count} {self.noun} of {self.owner}"


def check_fits(fits: Sequence[Fit], tp: int) -> None:
    """Refuse a number of ranks that one of the numbers does not allow.

    Raises:
        PlanError: names the first one, and every size that all allow.
    """
    wrong = next((fit for fit in fits if not fit.allows(tp)), None)
    if wrong is None:
        return
    largest = max(fit.count for fit in fits)
    sizes = [size for size in range(1, largest + 1) if all(fit.allows(size) for fit in fits)]
    listed = ", ".join(str(size) for size in sizes)
    raise PlanError(f"{wrong.complaint(tp)}; choose a size that fits the whole model: {listed}.")
