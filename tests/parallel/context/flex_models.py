"""A small model whose attention is torch's flex attention, and its twin with the formula written out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, HEADS, KEY_HEADS = 53, 32, 4, 2
Places = Callable[[Any, Any, Any, Any], Any]
MASKS: Mapping[str, Callable[[Tensor], Places]] = {
    "causal": lambda documents: lambda b, h, q, k: q >= k,
    "documents": lambda documents: lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]),
    "windows by head": lambda documents: lambda b, h, q, k: (q >= k) & (q - k < 5 + 7 * h),
    "hidden": lambda documents: lambda b, h, q, k: (documents[b, k] > 0) & (documents[b, q] > 0),
}
"""Functions that return the function of a mask, for document numbers [B, S]; "hidden": some queries see no key."""


class FlexAttention(nn.Module):
    """Grouped attention with a bias by head and distance, and scores that are capped."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * size) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, KEY_HEADS), (self.v, KEY_HEADS))
        )
        out: Tensor = self.o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Tensor = flex_attention(q, k, v, score_mod=changed, block_mask=mask, enable_gqa=True)
        return out


class DenseAttention(FlexAttention):
    """The same attention, by the formula."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        return written_out(q, k, v, changed, mask)


def changed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Return a score after a bias by head and distance, and a cap."""
    return 3 * torch.tanh((score - 0.02 * (h + 1) * (q - k).abs()) / 3)


def written_out(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any) -> Tensor:
    """Return attention by its formula; queries that see no key get zeros."""
    b, h, i, j = (
        torch.arange(size).view([-1 if dim == place else 1 for dim in range(4)])
        for place, size in enumerate((*q.shape[:3], k.shape[2]))
    )
    scores = score_mod(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, b, h, i, j)
    weights: Tensor = scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf).softmax(-1)
    return weights.nan_to_num(0.0) @ v


class Block(nn.Module):
    def __init__(self, attention: type[FlexAttention]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.down(torch.relu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class FlexModel(nn.Module):
    """Model that makes its mask in each forward, in blocks of ``block`` positions."""

    def __init__(self, mask: str = "documents", block: int = 128, attention: type[FlexAttention] = FlexAttention):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask, self.size, self.dense = MASKS[mask], block, attention is DenseAttention

    def forward(self, input_ids: Tensor, document_ids: Tensor, labels: Tensor) -> Tensor:
        rows, length = input_ids.shape
        mask: Any = self.mask(document_ids)
        if not self.dense:
            device = input_ids.device
            mask = create_block_mask(mask, rows, HEADS, length, length, device=device, BLOCK_SIZE=self.size)
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batches_of(length: int, steps: int = 3, rows: int = 2) -> Sequence[dict[str, Tensor]]:
    """Return batches of rows with two or three documents; the first is number 0."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        ids, labels = (torch.randint(0, VOCABULARY, (rows, length), generator=draw) for _ in range(2))
        ends = torch.tensor([[length // 3, length], [length // 5, length // 2]])[torch.arange(rows) % 2]
        documents = (torch.arange(length) >= ends[..., None]).sum(1)
        found.append({"input_ids": ids, "document_ids": documents, "labels": labels})
    return found
