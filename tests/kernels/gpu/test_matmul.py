"""The product kernel in small tiles: ragged in every dim, many tiles a program, every layout; which tile is chosen."""

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu.launch_shapes import AMPERE, EXACT, HOPPER, TF32, Tile, choose_tile, tiles_for
from engine.kernels.gpu.matmul import Follows, launch_matmul

ROWS, COLUMNS, DEPTH = 56, 72, 40
LARGEST, MIDDLE, SMALLEST = HOPPER


def small(described: bool, parts: int = 2) -> Tile:
    return Tile(32, 32, 16, 4, 2, parts, described)


def lying(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Random, in the memory of its transposed or in its own."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return values.t().contiguous().t() if transposed else values


@pytest.mark.parametrize("described", [True, False], ids=["TMA", "pointers"])
@pytest.mark.parametrize("transposed", [(False, True), (False, False), (True, False), (True, True)], ids=str)
def test_every_layout_and_ragged_size(transposed: tuple[bool, bool], described: bool) -> None:
    a = lying(ROWS, DEPTH, transposed[0], torch.float32)
    b = lying(DEPTH, COLUMNS, transposed[1], torch.float32)
    found, kept = launch_matmul(a, b, Follows(), tile=small(described))
    torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)
    assert not kept.numel()


@pytest.mark.parametrize("described", [True, False], ids=["TMA", "pointers"])
def test_columns_of_a_wider_matrix_are_read_at_their_place(described: bool) -> None:
    a, b = lying(ROWS, DEPTH, False, torch.float32), lying(DEPTH, 2 * COLUMNS, False, torch.float32)[:, COLUMNS:]
    found, _ = launch_matmul(a, b, Follows(), tile=small(described))
    torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("described", [True, False], ids=["TMA", "pointers"])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_tile_is_finished_in_parts(parts: int, described: bool) -> None:
    a, b = lying(ROWS, DEPTH, False, torch.bfloat16), lying(DEPTH, COLUMNS, True, torch.bfloat16)
    bias, residual = lying(1, COLUMNS, False, torch.bfloat16)[0], lying(ROWS, COLUMNS, False, torch.bfloat16)
    found, kept = launch_matmul(a, b, Follows(bias, "silu", residual, keeps=True), tile=small(described, parts))
    exact = a.double() @ b.double()
    torch.testing.assert_close(kept.double(), exact, rtol=2**-8, atol=1e-5)
    expected = torch.nn.functional.silu(exact + bias) + residual
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("described", [True, False], ids=["TMA", "pointers"])
def test_nothing_is_read_or_written_beside_the_matrices(described: bool) -> None:
    around = torch.full((3, ROWS, COLUMNS), float("nan"))
    a, b = lying(ROWS, DEPTH, False, torch.float32), lying(DEPTH, COLUMNS, True, torch.float32)
    launch_matmul(a, b, Follows(), around[1], tile=small(described))
    assert around[[0, 2]].isnan().all() and around[1].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((8192, 8192), LARGEST),
        ((8192, 28672), LARGEST),
        ((64, 4096), SMALLEST),
        ((1, 128), SMALLEST),
        ((2048, 1024), MIDDLE),
    ],
)
def test_the_tile_fills_all_processors(shape: tuple[int, int], tile: Tile) -> None:
    assert choose_tile(*shape, HOPPER, 132) is tile


def test_tiles_are_those_of_the_gpu_and_dtype() -> None:
    assert tiles_for(2, False, (9, 0)) == tiles_for(2, False, (10, 0)) == HOPPER
    assert tiles_for(2, False, (8, 0)) == AMPERE
    assert tiles_for(4, False, (9, 0)) == (EXACT,) and tiles_for(4, True, (9, 0)) == (TF32,)
