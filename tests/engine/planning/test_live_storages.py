"""Live bytes of small pieces of code, exactly: what autograd saves, views, what is made before."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.planning.activation_memory import LiveStorages

ROWS, WIDTH = 6, 16
BYTES = 4 * ROWS * WIDTH


def test_a_storage_counts_once_and_until_its_last_holder() -> None:
    with LiveStorages() as live:
        x = torch.ones(ROWS, WIDTH)
        view = x.view(-1)[3:]
        assert live.bytes == live.peak == BYTES
        del x
        assert live.bytes == BYTES
        del view
        assert live.bytes == 0 and live.peak == BYTES


def test_what_was_made_before_is_not_counted() -> None:
    x = torch.ones(ROWS, WIDTH)
    with LiveStorages() as live:
        x.mul_(2)
        part = x[1:]
        assert live.bytes == 0
        live.take_in(x)
        assert live.bytes == BYTES
        live.leave_out(part)
        assert live.bytes == 0


def test_the_peak_begins_anew_and_counts_resized_storages() -> None:
    other = 0
    live = LiveStorages(lambda: other)
    with live:
        torch.ones(ROWS, WIDTH)
        assert (live.peak, live.mark(), live.peak) == (BYTES, 0, 0)
        other = 100
        torch.ones(1)
        assert live.peak == 104
    assert live.bytes == 0


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        (lambda x: x * 2, 1),  # the result, which the caller holds
        (lambda x: x.exp(), 1),  # saves its result
        (lambda x: x.sin().cos(), 2),
        (lambda x: functional.layer_norm(x, (WIDTH,)), 1 + 2 / WIDTH),  # mean and rstd of every row
        (lambda x: functional.gelu(x * 1), 2),
        (lambda x: checkpoint(lambda y: (y * 1).sin().cos() * 1, x, use_reentrant=False), 1),
        (lambda x: x.view(-1).view(ROWS, WIDTH), 0),
    ],
)  # fmt: skip
def test_what_autograd_saves(layer: object, kept: float) -> None:
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with LiveStorages() as live:
        y: Tensor = layer(x)  # type: ignore[operator]
        assert live.bytes == kept * BYTES
        torch.autograd.backward(y.sum())
        x.grad = None
        del y
        assert live.bytes == 0


def test_a_block_keeps_its_two_products_and_the_activation() -> None:
    model, x = block(), torch.ones(ROWS, WIDTH)
    with LiveStorages() as live:
        y = model(x)
        assert live.bytes == 3 * BYTES
        torch.autograd.backward(y, torch.ones_like(y))
        assert live.bytes == BYTES + 2 * 4 * (WIDTH + 1) * WIDTH  # y, and the gradients of weights and biases
