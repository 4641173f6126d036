"""The kernels that a run would choose on a GPU that is not here."""

import torch

from engine.kernels.dispatch import Kernels, Mode, find_choice, shipped_choices


class PlannedKernels(Kernels):
    """Chooses as :class:`Kernels` does on a GPU with Triton; only shapes ever reach the operators.

    Args:
        card: name of the GPU, as rows of ``tuned.json`` have it.
    """

    def __init__(self, mode: Mode, card: str) -> None:
        super().__init__(mode)
        self.card = card

    def replaces(self, device: torch.device) -> bool:
        """Modules are given our operators, as on any GPU."""
        return True

    def _decide(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        if self.mode != "auto":
            return self.mode == "triton"
        name = str(dtype).removeprefix("torch.")
        row = find_choice(shipped_choices(), operator, self.card or "*", name, width)
        return row is not None and row.triton
