"""Which implementation of an operator runs: torch's, which is the reference, or a Triton kernel.

    "reference"   torch, on any device
    "triton"      Triton, wherever a tensor fits the kernel
    "auto"        on a GPU with Triton the winner that the table names for this device, dtype and width, else torch

``tuned.json`` is the table. A row holds from its width on, up to the next row of the same device; rows of the
device's own name go before those of "*", which nobody has measured and which say so.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

logger = logging.getLogger("trine")

Mode = Literal["auto", "reference", "triton"]


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """A row of the table."""

    operator: str
    device: str
    """Pattern of the GPU's name, as ``torch.cuda.get_device_name`` gives it."""
    dtype: str
    """Pattern of a dtype's name."""
    width: int
    """The row holds from here on: elements of a row, or inputs of a product."""
    triton: bool
    speedup: float | None = None
    """Measured time of torch over that of Triton; None: expected from the bytes that are moved."""

    @property
    def reason(self) -> str:
        """Why."""
        return "not measured on this GPU" if self.speedup is None else f"measured {self.speedup:.2f}x torch"


def read_choices(text: str) -> tuple[TunedChoice, ...]:
    """The rows of a table in JSON."""
    return tuple(TunedChoice(**row) for row in json.loads(text)["winners"])


@cache
def shipped_choices() -> tuple[TunedChoice, ...]:
    """The table beside this file."""
    return read_choices((Path(__file__).resolve().parent / "tuned.json").read_text(encoding="utf-8"))


def find_choice(rows: Iterable[TunedChoice], operator: str, device: str, dtype: str, width: int) -> TunedChoice | None:
    """The row that holds: of this device before "*", of the largest width that is not above."""
    held = [
        row
        for row in rows
        if row.operator == operator
        and fnmatchcase(device, row.device)
        and fnmatchcase(dtype, row.dtype)
        and row.width <= width
    ]
    return max(held, key=lambda row: (row.device != "*", row.width), default=None)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, which it does on CPU tensors too."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Whether kernels can run on tensors of ``device``."""
    return has_triton() and (device.type == "cuda" or (device.type == "cpu" and is_interpreted()))


def gpu_name(device: torch.device) -> str:
    """Name of a GPU, as rows of the table have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Kernels:
    """The decisions of one run."""

    def __init__(self, mode: Mode = "auto", winners: tuple[TunedChoice, ...] | None = None) -> None:
        self.mode = mode
        self._winners = shipped_choices() if winners is None else winners
        self._made: dict[tuple[Any, ...], bool] = {}
        self.card: str | None = None
        """GPU whose rows of the table hold, "" for none; None: the one that a tensor lies on."""

    def replaces(self, device: torch.device) -> bool:
        """Whether modules of a model get our operators at all; "auto" leaves what runs on a CPU as it is."""
        return self.mode != "auto" or device.type == "cuda"

    def triton(self, operator: str, x: Tensor, width: int) -> bool:
        """Whether a Triton kernel is to run on ``x``; each new decision is logged once."""
        # of a width that torch.compile left open, the length of a range is a number again
        return self._known(operator, x.device, x.dtype, len(range(width)))

    def _known(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        key = operator, device, dtype, width
        if key not in self._made:
            self._made[key] = self._decide(operator, device, dtype, width)
        return self._made[key]

    # To torch.compile the answer is a constant. torch.compiler.assume_constant_result says the same, but would import
    # the compiler, which takes as long as torch.
    _known._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _decide(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        name = str(dtype).removeprefix("torch.")
        if self.mode == "reference" or self.card == "" or not runs_triton(device):
            return False
        if self.mode == "triton":
            chosen, why = True, "as configured"
        else:
            row = find_choice(self._winners, operator, self.card or gpu_name(device), name, width)
            chosen, why = (False, "not in the table") if row is None else (row.triton, row.reason)
        logger.info("kernels: %s, %s, width %d: %s, %s", operator, name, width, _NAMES[chosen], why)
        return chosen


REFERENCE = Kernels("reference")
"""Torch's, always."""
_NAMES = ("torch", "triton")


def is_narrow(x: Tensor) -> bool:
    """Whether kernels take ``x``: fp32, fp16 or bf16, with a last dim."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.dim() > 0 and x.shape[-1] > 0


def rows_of(x: Tensor) -> Tensor:
    """[.., H] as [N, H] whose rows are contiguous; a copy only where leading dims do not lie evenly."""
    x_NH = x.reshape(-1, x.shape[-1])
    return x_NH if x_NH.stride(1) == 1 or x_NH.shape[1] == 1 else x_NH.contiguous()
