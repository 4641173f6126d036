"""What tensor parallelism sends: bytes and calls by label, exactly, and the same labels in a dry run: none."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from engine.models.decoder import Decoder, loss_sum
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from tests.parallel.tensor.models import LENGTH, VOCABULARY, build, decoder, tokens
from tests.parallel.tensor.sharded import Sharded, shard
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Rows = dict[str, tuple[int, int]]

ROWS, WIDTH, BLOCKS = 3, 32, 2
TOKENS = ROWS * LENGTH


def rows(sharded: Sharded) -> Rows:
    """Calls and bytes by label."""
    return {row.label: (row.calls, row.bytes) for row in sharded.comm.tally.rows()}


def step(model: nn.Module) -> None:
    """Forward and backward of one microbatch."""
    ids = tokens(ROWS)
    if isinstance(model, Decoder):
        loss, _ = loss_sum(model(ids), {"labels": ids})
    else:
        loss = model(input_ids=ids, labels=ids).loss
    torch.autograd.backward(loss)


def traffic(dtype: torch.dtype, *names: str) -> list[Rows]:
    """Body of a rank: one microbatch of each model."""
    found = []
    for name in names:
        sharded = shard(build(name).to(dtype))
        step(sharded.model)
        found.append(rows(sharded))
        sharded.comm.close()
    return found


def expected(tp: int, element: int) -> Rows:
    """Budget of one microbatch (DESIGN section 7)."""

    def ring(elements: int, size: int) -> int:
        return 2 * elements * size * (tp - 1) // tp

    one = ring(TOKENS * WIDTH, element)
    return {
        "row outputs": (2 * BLOCKS, 2 * BLOCKS * one),
        "column inputs": (2 * BLOCKS + 1, (2 * BLOCKS + 1) * one),  # one more for the head
        "embedding": (1, one),
        "loss": (2, ring(TOKENS, 4) + ring(2 * TOKENS, 4)),
    }


@pytest.mark.parametrize("tp", [2, wide(4)])
def test_calls_and_bytes_of_a_microbatch(run_ranks: RunRanks, tp: int) -> None:
    names = ("decoder", "decoder-tied", "llama-kv2", "gpt2", "gemma2")
    assert run_ranks(traffic, tp, torch.float32, *names) == [[expected(tp, 4)] * len(names)] * tp


def test_bf16_activations_travel_as_bf16_and_the_loss_in_fp32(run_ranks: RunRanks) -> None:
    assert run_ranks(traffic, 2, torch.bfloat16, "decoder") == [[expected(2, 2)]] * 2


class Recomputed(nn.Module):
    """A block whose activations are recomputed."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Without the block's activations."""
        y: torch.Tensor = checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return y


def recomputing() -> tuple[Rows, int]:
    """Body of a rank: the traffic, and the input copies that a region still holds after backward."""
    sharded = shard(build("decoder"))
    model = sharded.model
    assert isinstance(model, Decoder)
    regions = [vars(module)["tensor_region"] for module in model.modules() if "tensor_region" in vars(module)]
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    step(model)
    left = sum(len(region._copies) for region in regions)
    found = rows(sharded)
    sharded.comm.close()
    return found, left


def test_recomputation_adds_at_most_two_sums_a_block_and_holds_nothing(run_ranks: RunRanks) -> None:
    for found, left in run_ranks(recomputing, 2):
        calls, sent = found.pop("row outputs")
        once = expected(2, 4)
        each = once.pop("row outputs")[1] // (2 * BLOCKS)
        assert found == once
        assert 2 * BLOCKS < calls <= 4 * BLOCKS and sent == calls * each
        assert left == 0


def reading_logits() -> tuple[Rows, list[str]]:
    """Body of a rank: an argmax and a second look at the same logits."""
    sharded = shard(build("decoder").eval())
    with torch.no_grad():
        logits = sharded.model(tokens(ROWS))
        logits.argmax(-1)
        logits.softmax(-1)
    found = rows(sharded)
    sharded.comm.close()
    return found, logits.vocabulary.gathers


def test_a_function_without_a_rule_gathers_once_and_is_remembered(run_ranks: RunRanks) -> None:
    tp = 4
    one = 2 * TOKENS * WIDTH * 4 * (tp - 1) // tp
    padded = TOKENS * -(-VOCABULARY // tp) * tp
    for found, reasons in run_ranks(reading_logits, tp):
        assert found == {
            "embedding": (1, one),
            "row outputs": (2 * BLOCKS, 2 * BLOCKS * one),
            "logits": (1, padded * 4 * (tp - 1) // tp),
        }
        assert reasons == ["argmax"]


def dry() -> tuple[Rows, tuple[int, ...], bool]:
    """Body of a rank: one step in a dry run."""
    sharded = shard(build("decoder"))
    before = torch.get_rng_state()
    with sharded.axis.dry_run():
        logits = sharded.model(tokens(ROWS))
        torch.autograd.backward(logits.sum())
    same = torch.equal(before, torch.get_rng_state())
    found = rows(sharded)
    sharded.comm.close()
    return found, tuple(logits.shape) if type(logits) is torch.Tensor else (), same


def test_a_dry_run_has_the_shapes_and_sends_and_draws_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(dry, 4) == [({}, (ROWS, LENGTH, VOCABULARY), True)] * 4


def copied() -> Rows:
    """Body of a rank: a deep copy of a cut model works, over the same processes."""
    sharded = shard(decoder())
    step(deepcopy(sharded.model))
    found = rows(sharded)
    sharded.comm.close()
    return found


def test_a_copied_model_works(run_ranks: RunRanks) -> None:
    assert run_ranks(copied, 2) == [expected(2, 4)] * 2


def gathered_outputs() -> bool:
    """Body of a rank: whole() in a Hugging Face output and in a dict."""
    sharded = shard(build("llama-kv2").eval())
    with torch.no_grad():
        output = gather_logits(sharded.model(input_ids=tokens()))
        nested = gather_logits({"a": [sharded.model(input_ids=tokens()).logits], "b": 3})
    sharded.comm.close()
    return type(output.logits) is torch.Tensor and torch.equal(output.logits, nested["a"][0]) and nested["b"] == 3


def test_whole_replaces_logits_wherever_they_are(run_ranks: RunRanks) -> None:
    assert run_ranks(gathered_outputs, 2) == [True] * 2
