"""Random programs of reshapes, slices, products and functions, whole and on parts."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal

WIDTH = 24


def _permute(x: Tensor, rng: random.Random) -> Tensor:
    dims = list(range(x.ndim))
    rng.shuffle(dims)
    return x.permute(dims)


def _swap(x: Tensor, rng: random.Random) -> Tensor:
    return x.transpose(rng.randrange(x.ndim), rng.randrange(x.ndim))


def _unflatten(x: Any, rng: random.Random) -> Tensor:
    dim = rng.randrange(x.ndim)
    factors = [n for n in (2, 3, 4, 6) if x.shape[dim] % n == 0]
    return x.unflatten(dim, (rng.choice(factors), -1)) if factors and x.ndim < 6 else x  # type: ignore[no-any-return]


def _flatten(x: Tensor, rng: random.Random) -> Tensor:
    start = rng.randrange(x.ndim)
    return x.flatten(start, min(start + 1, x.ndim - 1)) if x.ndim > 2 else x


def _slice(x: Tensor, rng: random.Random) -> Tensor:
    dim = rng.randrange(x.ndim)
    size = x.shape[dim]
    if size < 4:
        return x
    start = rng.randrange(size // 2)
    return x.narrow(dim, start, rng.randrange(2, size - start + 1))


def _chunk(x: Tensor, rng: random.Random) -> Tensor:
    dim = rng.randrange(x.ndim)
    pieces = x.chunk(2, dim) if x.shape[dim] % 2 == 0 else (x, x * 2)
    return pieces[0] * pieces[1]


def _cat(x: Tensor, rng: random.Random) -> Tensor:
    return torch.cat([x, torch.sin(x)], rng.randrange(x.ndim)) if x.numel() < 3000 else x


def _double(x: Tensor, rng: random.Random) -> Tensor:
    return x.repeat_interleave(2, rng.randrange(x.ndim)) if x.numel() < 3000 else x


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh, functional.gelu, lambda t: t * 0.5 + 1, lambda t: t - t.detach() / 3,
)  # fmt: skip


def _function(x: Tensor, rng: random.Random) -> Tensor:
    return rng.choice(FUNCTIONS)(x)


def _vector(x: Tensor, rng: random.Random) -> Tensor:
    return x * normal(x.shape[-1], seed=rng.randrange(9))


def _column(x: Tensor, rng: random.Random) -> Tensor:
    return x + normal(*x.shape[:1], *(1,) * (x.ndim - 1), seed=rng.randrange(9))


def _softmax(x: Tensor, rng: random.Random) -> Tensor:
    return x.softmax(rng.randrange(x.ndim))


def _center(x: Tensor, rng: random.Random) -> Tensor:
    return x - x.mean(rng.randrange(x.ndim), keepdim=True)


def _product(x: Tensor, rng: random.Random) -> Tensor:
    return functional.linear(x, normal(rng.choice([4, 6]), x.shape[-1], seed=rng.randrange(9)) / 5)


def _gram(x: Tensor, rng: random.Random) -> Tensor:
    return torch.tanh(x @ x.transpose(-1, -2) / 10) @ x if x.ndim > 1 else x


def _in_place(x: Tensor, rng: random.Random) -> Tensor:
    x = x * 1
    x += 1
    return x.mul_(2)


STEPS = (
    _permute, _swap, _unflatten, _flatten, _slice, _chunk, _cat, _double, _function, _vector, _column, _softmax,
    _center, _product, _gram, _in_place,
)  # fmt: skip


def program(seed: int, length: int) -> Any:
    """A program that is the same on all ranks."""

    def body(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        rng = random.Random(seed)
        out = functional.linear(y + x, w)
        for _ in range(length):
            out = rng.choice(STEPS)(out, rng)
            if out.ndim == 1:
                out = out.unsqueeze(0)
        return [out, x * 2]

    return body


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program(seed: int) -> None:
    rng = random.Random(seed)
    ranks, kind = rng.choice([2, 4]), rng.choice(KINDS)
    given = {
        "x": Given(normal(2, 6, 12), {}),
        "y": Given(normal(2, 6, 12, seed=1)),
        "w": Given(normal(WIDTH, 12, seed=2) / 4, {0: kind}, True),
    }
    compare(program(seed, 8), given, ranks, bound=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_many_random_programs(seed: int) -> None:
    test_a_random_program(seed)
