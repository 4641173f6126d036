"""Code outside blocks reads the sizes of whole layers, whatever a tensor rank holds of them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import verify
from tests import models
from tests.engine.parity.launches import settings

RunRanks = Callable[..., list[Any]]
WIDTH = 16
TOKENS = models.VOCABULARY + 3  # the tensor size does not divide it
PLAN = {"embed": "vocabulary", "head": "vocabulary", "blocks.?": "divide:heads", "*.qkv": "column fused:3 head:4",
        "*.out": "row", "*.up": "column", "*.down": "row"}  # fmt: skip


class Block(nn.Module):
    """Reads the sizes of its own layers and its number of heads, with which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        held = self.qkv.weight.shape[0] // 3
        q, k, v = (
            part.view(*part.shape[:2], self.heads, held // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(held, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(x)).view(*x.shape[:2], self.up.out_features)
        return x + self.down(hidden)


class Sized(nn.Module):
    """A decoder whose glue and loss depend on sizes of layers in other modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH, padding_idx=TOKENS - 1), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def sizes(self) -> dict[str, Any]:
        """Every way of asking for a size."""
        block: Any = self.blocks[1]
        weight = self.head.weight
        return {
            "shape": tuple(weight.shape), "size": tuple(weight.size()), "one": weight.size(0), "last": weight.size(-2),
            "numel": weight.numel(), "nelement": weight.nelement(), "len": len(weight), "bias": len(self.head.bias),
            "rows": self.embed.num_embeddings, "padding": self.embed.padding_idx, "tokens": self.head.out_features,
            "up": block.up.out_features, "down": block.down.in_features, "qkv": tuple(block.qkv.weight.shape),
            "heads": block.heads, "all": sum(p.numel() for p in self.parameters()),
        }  # fmt: skip

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        sizes = self.sizes()
        x = self.embed(ids) * math.log(sizes["rows"]) / math.sqrt(sizes["heads"])
        for block in self.blocks:
            x = block(x) + 0.01 * x.new_full((sizes["up"],), sizes["down"]).mean() / sizes["qkv"][0]
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=self.embed.padding_idx or 0)
        return loss / math.log(self.head.weight.shape[0]) + 1e-3 * sizes["all"] / sizes["numel"]


def config(plan: Any, stage: int = 0, **axes: int) -> dict[str, Any]:
    """Settings of a run with two tensor ranks."""
    parallel = {"data": 1, "tensor": 2, "tensor_plan": plan} | axes
    return settings(axes.get("pipeline", 1), parallel=parallel, zero_optimization={"stage": stage})


def plain(stage: int = 0, **axes: int) -> dict[str, Any]:
    """Settings of a run without tensor ranks."""
    return settings(axes.get("pipeline", 1), parallel=axes, zero_optimization={"stage": stage})


@pytest.mark.parametrize(
    ("ranks", "made"),
    [
        (2, config(PLAN)),
        (4, config(PLAN, pipeline=2)),
        pytest.param(2, config("auto"), marks=pytest.mark.long),
        pytest.param(4, config(PLAN, 3, data=2), marks=pytest.mark.long),
        pytest.param(4, config(PLAN, 1, data=2) | {"activation_checkpointing": {"mode": "full"}},
                     marks=pytest.mark.long),
        pytest.param(2, plain(1, data=2), marks=pytest.mark.long),
        pytest.param(2, plain(3, data=2), marks=pytest.mark.long),
        pytest.param(2, plain(pipeline=2), marks=pytest.mark.long),
    ],
    ids=["tp2", "tp2 x pp2", "tp2 searched", "dp2 x tp2 ZeRO 3", "dp2 x tp2 recomputed", "dp2", "dp2 ZeRO 3", "pp2"],
)  # fmt: skip
def test_glue_and_loss_read_whole_sizes(ranks: int, made: dict[str, Any]) -> None:
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(made["train_batch_size"], 3)]
    result = verify(Sized, made, batches, threads=ranks)
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
def test_the_loop_of_a_user_reads_whole_sizes_except_beside_values_of_a_part(stage: int) -> None:
    """In the loss, after a backward that guards gradients, in a copy, under ZeRO 3, and as before after the end."""
    before = Sized().sizes()

    def body(world: World) -> None:
        model = Sized()
        own = {name: (type(module), vars(module).keys() - {"forward"}) for name, module in model.named_modules()}
        batch = tuple(part[:2] for part in (torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)))
        read: list[dict[str, Any]] = []

        def loss(output: Tensor, batch: Any) -> Tensor:
            read.append(model.sizes())
            return output

        made = config(PLAN, stage, data=1 if stage == 0 else 2) | {"train_batch_size": 2 if stage == 0 else 4}
        with engine.initialize(model, made, loss, batch, world=world) as eng:
            out = eng(batch)
            eng.backward(out)
            read += [model.sizes(), *([copy.deepcopy(model).sizes()] if stage == 0 else [])]
            eng.step()
            assert all(sizes == before for sizes in read) and len(read) > 1, read
            with eng.full_parameters("*.weight") as parameters:
                assert all(p.numel() == p.data.numel() and p.shape == p.data.shape for p in parameters.values())
            assert model.sizes() == before
        assert {name: (type(m), vars(m).keys() - {"forward"}) for name, m in model.named_modules()} == own

    run_thread_ranks(2 if stage == 0 else 4, body)
