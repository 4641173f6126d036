"""Text of this machine, and a small decoder that learns its bytes."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.decoder import Decoder, DecoderConfig

SIZES = DecoderConfig(layers=2, width=64, heads=4, context=64)
FILES = 60
"""Sources of Python's standard library that are read, in the order of their names."""
TRAINED = 0.9
"""Fraction of the text that sites train on; the rest is for validation."""
ROWS, VALIDATION_ROWS = 4, 256
_VALIDATION_SEED = 10**9


@cache
def corpus() -> Tensor:
    """Returns the bytes of the text, uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:FILES])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_model() -> Decoder:
    """Returns the decoder with its initial weights, equal in every call."""
    torch.manual_seed(1)
    return Decoder(SIZES)


def training_rows(site: int, step: int) -> Tensor:
    """Returns the rows of one site and step, int64 [rows, context + 1]: a function of both numbers alone."""
    end = int(len(corpus()) * TRAINED)
    return _rows(corpus()[:end], ROWS, seed=1_000_003 * (site + 1) + step)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows, in nats."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Returns the mean cross-entropy of text that no site trains on."""
    begin = int(len(corpus()) * TRAINED)
    rows = _rows(corpus()[begin:], VALIDATION_ROWS, _VALIDATION_SEED)
    return float(loss_of(model, rows))


def _rows(text: Tensor, count: int, seed: int) -> Tensor:
    length = SIZES.context + 1
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
