"""Shapes and pieces."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal, run


def x(kind: str, dim: int = 1) -> Given:
    """[2, 24, 12], cut."""
    return Given(normal(2, 24, 12), {dim: kind})


LOCAL: dict[str, Callable[..., Any]] = {
    "permute": lambda x: x.permute(2, 0, 1).transpose(0, 1).swapaxes(1, 2).mT,
    "torch forms": lambda x: torch.permute(torch.transpose(x, 0, 2), (0, 2, 1)),
    "movedim": lambda x: x.movedim(0, -1).movedim((0, 1), (1, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(-1).squeeze() + x[:, None].squeeze(1),
    "flatten outer": lambda x: x.unflatten(2, (3, 4)).flatten(-2).view(2, 24, 3, -1).reshape(-1, 24, 3, 2, 2),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1, 12) + x.expand_as(torch.zeros(5, 1, 2, 24, 12))[0],
    "repeat": lambda x: x.repeat(2, 1, 3) + x.repeat_interleave(2, dim=0).repeat_interleave(3, dim=-1),
    "repeat cut": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave cut": lambda x: torch.repeat_interleave(x, 3, dim=1),
    "expand heads": lambda x: x[:, :, None, :].expand(2, 24, 3, 12).reshape(2, 72, 12),
    "slices": lambda x: x[0] + x[..., 2:5].sum(-1, keepdim=True)[1] + x[-1, :, ::3][:, :1],
    "indices": lambda x: x[:, :, torch.tensor([1, 3, 3])] + x[..., [0]] + x.index_select(2, torch.tensor([0, 2, 1])),
    "unbind": lambda x: x.unbind(0)[1] * x.unbind(-1)[3][0].unsqueeze(-1),
    "iterate": lambda x: next(iter(x)) * len(x),
    "narrow": lambda x: x.narrow(2, 3, 4) + x.narrow(-1, -4, 4),
    "split": lambda x: [*x.split(5, dim=2), *x.chunk(3, -1), *torch.split(x, [4, 8], 2), *x.tensor_split(5, dim=2)],
    "cat": lambda x: torch.cat([x, x * 2, torch.ones(2, 24, 1).double()], dim=-1),
    "stack": lambda x: torch.stack([x, x * 2], dim=1) + torch.stack((x, x)).transpose(0, 1),
    "roll": lambda x: torch.roll(x, 2, dims=-1).flip(0),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "view_as": lambda x: x.view_as(torch.zeros(2, 24, 12)) + x.reshape_as(torch.zeros(1, 2, 24, 12)),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("kind", KINDS)
def test_without_communication(name: str, kind: str) -> None:
    found = compare(LOCAL[name], {"x": x(kind)}, 2)
    assert not found[0].called and not found[0].gathers


CUT: dict[str, Callable[..., Any]] = {
    "split": lambda x: list(x.split(8, dim=1)),
    "chunk": lambda x: list(x.chunk(3, 1)),
    "slice": lambda x: x[:, 3:20:2],
    "reshape": lambda x: [x.view(2, 3, 8, 12), x.view(2, 6, 4, 12), x.reshape(48, 12), x.reshape(2, -1)],
    "cat": lambda x: torch.cat([x, x[:, ::3], torch.ones(2, 3, 12).double()], 1),
    "select": lambda x: [x[:, 0], x[:, -1, 2], x[0, 5:6], x.select(1, 7)],
    "gathered": lambda x: [x.unbind(1)[3], x[:, torch.tensor([0, 5])], torch.roll(x, 3, 1), x.flip(1)],
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_along_the_cut_dim(name: str, kind: str, ranks: int) -> None:
    compare(CUT[name], {"x": x(kind)}, ranks)


def test_thirds_split_into_blocks_without_a_copy() -> None:
    def program(x: Any) -> list[Tensor]:
        pieces = list(x.split(8, dim=1))
        assert all(not getattr(piece, "copied", False) for piece in pieces)
        return pieces

    found = compare(program, {"x": x("thirds")}, 4)
    assert all(sets == Given(normal(2, 8, 12), {1: "blocks"}).sets(4) for sets in found[0].sets)
    assert not found[0].called


def test_one_position_of_a_cut_sequence_is_sent_to_all() -> None:
    found = compare(lambda x: x[:, -1], {"x": x("blocks")}, 4)
    assert [call.shape for call in found[0].called] == [(2, 1, 12)] and found[0].gathers == {"select": 1}


def test_properties_answer_for_the_whole() -> None:
    def program(x: Tensor) -> Tensor:
        assert x.shape == (2, 24, 12) == x.size() and x.size(-2) == 24 == x.size(dim=1) and x.ndim == x.dim() == 3
        assert x.numel() == x.nelement() == 576 == torch.numel(x) and len(x) == 2
        assert x.stride() == (288, 12, 1) and x.stride(0) == 288
        assert x.dtype is torch.float64 and x.device.type == "cpu" and not x.is_cuda and x.requires_grad
        assert x.is_floating_point() and torch.is_floating_point(x) and not x.is_complex() and x.element_size() == 8
        assert x.is_contiguous() and not x.is_sparse and x.get_device() == -1 and x.layout is torch.strided
        assert torch.result_type(x, 1) is torch.float64 and x.itemsize == 8 and not x.is_meta
        assert isinstance(x, Tensor) and x.grad_fn is not None and not x.is_leaf and x.grad is None
        assert "24" in repr(x) + str(x) + f"{x}"
        return x * 1

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")
        found = compare(program, {"x": x("thirds")}, 2)
    assert not found[0].called


WRONG: dict[str, Callable[..., Any]] = {
    "add": lambda x: x + torch.ones(12, 12).double(),
    "add_": lambda x: x.mul_(torch.ones(12, 12).double()),
    "select": lambda x: x[:, 24],
    "select below": lambda x: x.select(1, -25),
    "narrow": lambda x: x.narrow(1, 20, 5),
    "split": lambda x: torch.split(x, [20, 5], 1),
    "split dim": lambda x: torch.split(x, 4, 3),
    "sum": lambda x: x.sum(3),
    "softmax": lambda x: x.softmax(-4),
    "view": lambda x: x.view(2, 23, 12),
    "unflatten": lambda x: x.unflatten(1, (5, -1)),
    "expand": lambda x: x.expand(2, 48, 12),
    "expand one": lambda x: x.expand(-1, 2, 24, 12),
    "unsqueeze": lambda x: x.unsqueeze(4),
    "transpose": lambda x: x.transpose(0, 3),
    "permute": lambda x: x.permute(0, 1),
    "cat": lambda x: torch.cat([x, x[:, :, :5]], 0),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(3, 11).double()),
    "matmul": lambda x: x.transpose(1, 2) @ torch.ones(48, 3).double(),
    "bias": lambda x: torch.nn.functional.linear(torch.ones(5, 12).double(), x[0], torch.ones(48).double()),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (24, 11)),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", ["blocks", "shared"])
def test_what_torch_refuses_is_refused(name: str, kind: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        WRONG[name](normal(2, 24, 12))
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        run(WRONG[name], {"x": x(kind)}, 2)
