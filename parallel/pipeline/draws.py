"""Whether a program draws random numbers: torch marks the operations that do."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KNOWN = frozenset(("aten", "prims", "profiler", "c10d", "_c10d_functional"))
"""Where operations are marked; of others nobody knows."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes it in ``any`` while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marked = func.namespace not in _KNOWN or torch.Tag.nondeterministic_seeded in func.tags
        self.any = self.any or (marked and not _drops_nothing(func, args, kwargs))
        return func(*args, **kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention kernels are marked for their dropout, which most calls switch off."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
