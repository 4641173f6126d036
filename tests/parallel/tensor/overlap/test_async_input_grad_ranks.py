"""Between real processes: sums behind weight gradients give what sums that are waited for give, to the bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.layers.test_linear_ranks import make
from tests.parallel.tensor.models import build, tokens
from tests.parallel.tensor.overlap.test_async_input_grad import EVERYWHERE, cut, given, note
from tests.parallel.tensor.sharded import open_comm, shard

RunRanks = Callable[..., list[Any]]

MODELS = ("decoder", "decoder-tied", "llama-kv2", "qwen2-kv1", "gpt2", "gemma2")


def gradients(name: str, overlapped: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[tuple[str, int, int]]]:
    """Of one microbatch after another; what was sent."""
    sharded = shard(build(name).to(dtype))
    model, comm = sharded.model, sharded.comm
    if overlapped:
        sharded.axis.overlap = EVERYWHERE
    ids = tokens()
    for _ in range(2):
        output = model(ids) if "decoder" in name else model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())
        torch.autograd.backward(loss)
    sent = [(row.label, row.calls, row.bytes) for row in comm.tally.rows()]
    comm.close()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sorted(sent)


def both() -> None:
    """Body of a rank."""
    for name in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            plain, sent = gradients(name, False, dtype)
            late, sent_late = gradients(name, True, dtype)
            assert sent == sent_late
            assert plain.keys() == late.keys()
            different = [key for key in plain if not torch.equal(plain[key], late[key])]
            assert not different, (name, dtype, different)


def order() -> list[str]:
    """Body of a rank: what happens in a backward."""
    comm = open_comm()
    axis = TensorAxis(comm)
    model = cut(make("plain"), axis)
    y = model(given())
    events = note(axis, model)
    y.sum().backward()
    comm.close()
    return events


def test_weight_gradients_come_while_the_sum_travels(run_ranks: RunRanks) -> None:
    meanwhile = ["gate.weight", "gate.bias", "up.weight", "up.bias"]
    expected = ["down.weight", "start column inputs", *meanwhile, "end column inputs"]
    assert run_ranks(order, 2) == [expected] * 2


def order_at_the_head() -> list[str]:
    """Body of a rank: the same of a head."""
    sharded = shard(build("decoder"))
    sharded.axis.overlap = EVERYWHERE
    loss = nn.functional.cross_entropy(sharded.model(tokens()).flatten(0, 1), tokens().flatten())
    events = note(sharded.axis, sharded.model)
    torch.autograd.backward(loss)
    sharded.comm.close()
    return events


def test_so_does_the_gradient_of_a_head(run_ranks: RunRanks) -> None:
    for events in run_ranks(order_at_the_head, 2):
        assert events[:3] == ["start column inputs", "head.weight", "end column inputs"]


def test_gradients_and_traffic_are_the_same(run_ranks: RunRanks) -> None:
    run_ranks(both, 2)
