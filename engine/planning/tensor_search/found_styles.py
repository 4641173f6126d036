"""The result of a search for a tensor plan, as data that one rank makes and all ranks of the job read."""

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from torch import nn

from engine.parallel.model.name_patterns import starred
from engine.parallel.tensor.plan.resolve import match_styles
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.tensor_plan import Reason, TensorPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStyles:
    """What a search has found, as data: it is the same for every model of the same code and sizes."""

    patterns: Mapping[str, str]
    """Styles, as ``parallel.tensor_plan`` would contain them."""
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    def plan(self, model: nn.Module, tp: int, sequence: bool = False) -> TensorPlan:
        """The plan that these styles make of ``model``."""
        read = match_styles(model, self.patterns)
        plan = cut_model(model, read, tp, "found by zero patterns, proven", sequence)
        return replace(plan, patterns=self.patterns, reasons=self.reasons, notes=self.notes)

    def to_bytes(self) -> bytes:
        """Serialize for other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "FoundStyles":
        """Restore the result of ``to_bytes``."""
        read = json.loads(data)
        reasons = tuple(Reason(**reason) for reason in read["reasons"])
        return cls(patterns=read["patterns"], reasons=reasons, notes=tuple(read["notes"]))


def as_patterns(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """``styles`` with one pattern for names that differ in numbers only, if the pattern matches no other name."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    hits: dict[str, list[str]] = {}
    for name, style in styles.items():
        if (pattern := starred(name)) not in hits:
            hits[pattern] = fnmatch.filter(modules, pattern) or fnmatch.filter(parameters, pattern)
        found[pattern if all(styles.get(other) == style for other in hits[pattern]) else name] = style
    return found
