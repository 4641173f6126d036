"""Dropout: different between tensor ranks where activations are cut, equal where they are whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from tests.parallel.tensor.models import gpt2, tokens
from tests.parallel.tensor.sharded import shard

RunRanks = Callable[..., list[Any]]

WIDTH = 64
PLAN = {"*.up": "column", "*.down": "row"}


class Noisy(nn.Module):
    """A perceptron with dropout on its hidden values and on its result; it keeps both masks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.masks: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Residual, as in a transformer."""
        hidden = functional.dropout(torch.sigmoid(self.up(x)), 0.5, self.training)
        y = functional.dropout(torch.sigmoid(self.down(hidden)), 0.5, self.training)
        self.masks.append((hidden != 0, y != 0))
        return x + y


class Stack(nn.Module):
    """Two of them, recomputed in backward or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Noisy(), Noisy()])
        self.mode = "kept"

    def forward(self, x: Tensor) -> Tensor:
        """Through both."""
        for block in self.blocks:
            if self.mode == "kept":
                x = block(x)
            else:
                x = checkpoint.checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return x


Run = tuple[list[tuple[Tensor, Tensor]], Tensor, dict[str, Tensor]]


def train(model: Stack, mode: str) -> Run:
    """Masks, the random state afterwards, gradients."""
    model.mode = mode
    for block in model.blocks:
        block.masks.clear()  # type: ignore[operator, union-attr]
    model.zero_grad()
    torch.manual_seed(11)
    x = torch.randn(5, WIDTH, requires_grad=True)
    out = model(x)
    after = torch.get_rng_state()
    torch.autograd.backward(out.square().sum())
    masks = [pair for block in model.blocks for pair in block.masks]  # type: ignore[union-attr]
    return masks, after, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def all_modes(training: bool) -> dict[str, Run]:
    """Body of a rank."""
    sharded = shard(Stack().train(training), PLAN)
    assert isinstance(sharded.model, Stack)
    found = {mode: train(sharded.model, mode) for mode in ("kept", "reentrant", "non-reentrant")}
    sharded.comm.close()
    return found


def test_masks_differ_where_activations_are_cut_and_recomputation_draws_them_again(run_ranks: RunRanks) -> None:
    first, second = run_ranks(all_modes, 2, True)
    masks, after, gradients = first["kept"]
    others, after_too, _ = second["kept"]
    assert len(masks) == 2
    for (hidden, result), (other_hidden, other_result) in zip(masks, others, strict=True):
        assert not torch.equal(hidden, other_hidden)
        assert torch.equal(result, other_result)
    assert not torch.equal(masks[0][0], masks[1][0]) and not torch.equal(masks[0][1], masks[1][1])
    assert torch.equal(after, after_too)
    for rank in (first, second):
        for mode in ("reentrant", "non-reentrant"):
            assert all(torch.equal(rank["kept"][2][name], grad) for name, grad in rank[mode][2].items()), mode
            assert rank[mode][2].keys() == gradients.keys()


def test_evaluation_draws_nothing(run_ranks: RunRanks) -> None:
    for found in run_ranks(all_modes, 2, False):
        torch.manual_seed(11)
        torch.randn(5, WIDTH)
        assert torch.equal(found["kept"][1], torch.get_rng_state())


def gpt2_masks() -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Body of a rank: what the residual dropouts drop, and all gradients; activations kept, then recomputed."""
    found = []
    for recompute in (False, True):
        model: Any = gpt2(dropout=0.5).train()
        sharded = shard(model)
        if recompute:
            for block in model.transformer.h:
                block.forward = partial(checkpoint.checkpoint, block.forward, use_reentrant=False)
        zeros: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(("resid_dropout", "mlp.dropout", "transformer.drop")):
                module.register_forward_hook(lambda _, __, out, zeros=zeros: zeros.append(out == 0))
        torch.manual_seed(5)
        ids = tokens()
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        sharded.comm.close()
        found.append((zeros, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    return found


def test_gpt2_drops_the_same_residuals_on_all_ranks_and_again_when_recomputed(run_ranks: RunRanks) -> None:
    first, second = run_ranks(gpt2_masks, 2)
    for (masks, gradients), (other_masks, other_gradients) in zip(first, second, strict=True):
        assert len(masks) >= 5 and all(torch.equal(a, b) for a, b in zip(masks, other_masks, strict=True))
        for name in ("transformer.ln_f.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"):
            assert torch.equal(gradients[name], other_gradients[name])
    for kept, recomputed in (first, second):
        assert all(torch.equal(kept[1][name], gradient) for name, gradient in recomputed[1].items())
