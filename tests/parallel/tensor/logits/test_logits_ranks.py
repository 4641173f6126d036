"""Logits cut over the vocabulary behave as the whole tensor does: losses, reshapes, gathers, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import EngineError
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits, gather_logits
from engine.parallel.tensor.plan.ranges import cut_unevenly
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.sharded import assert_close, open_comm

RunRanks = Callable[..., list[Any]]
Use = Callable[[Tensor, Tensor], Any]

ROWS, LENGTH, SIZE = 3, 4, 11


def flat(loss: Callable[..., Tensor], **options: Any) -> Use:
    """A loss of [N, V] and [N]."""
    return lambda logits, labels: loss(logits.flatten(0, 1), labels.flatten(), **options)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face did it."""
    cut = logits[..., :-1, :].contiguous().float().view(-1, SIZE)
    loss: Tensor = nn.CrossEntropyLoss()(cut, labels[..., 1:].contiguous().view(-1).to(cut.device))
    return loss


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """Soft caps, a temperature as a tensor, and a mask of rows."""
    soft = 5 * torch.tanh(logits / 5.0) * torch.tensor(0.7) + 1
    return functional.cross_entropy(soft[labels >= 0], labels[labels >= 0])


STAYS: dict[str, Use] = {
    "mean": flat(functional.cross_entropy),
    "sum": flat(functional.cross_entropy, reduction="sum"),
    "none": flat(functional.cross_entropy, reduction="none"),
    "ignore": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten().clamp(0), ignore_index=2),
    "positional": lambda x, y: functional.cross_entropy(x[0], y[0], None, None, 2, None, "sum"),
    "module": flat(nn.CrossEntropyLoss()),
    "shifted": shifted,
    "capped": capped,
    "reshape": lambda x, y: functional.cross_entropy(x.reshape((ROWS * LENGTH, -1)), y.reshape(-1)),
    "one row": lambda x, y: functional.cross_entropy(x[0], y[0]),
    "last": lambda x, y: functional.cross_entropy(x[:, -1], y[:, -1].clamp(0)),
    "picked": lambda x, y: functional.cross_entropy(x[torch.tensor([0, 2]), 1:, :].flatten(0, 1), y[::2, 1:].flatten()),
    "to": lambda x, y: functional.cross_entropy(x.to("cpu").to(torch.float64).flatten(0, -2), y.flatten()),
    "weights": flat(functional.cross_entropy, weight=torch.arange(1.0, SIZE + 1)),
    "smoothing": flat(functional.cross_entropy, label_smoothing=0.1),
    "z-loss": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y) + 0.1 * x.logsumexp(-1).square().mean(),
    "nll": lambda x, y: functional.nll_loss(torch.log_softmax(x.flatten(0, 1), -1), y.flatten()),
    "take": lambda x, y: x.gather(-1, y.clamp(0).unsqueeze(-1)).sum(),
    "half": lambda x, y: functional.cross_entropy(x.bfloat16().flatten(0, 1), y.flatten()).float(),
}

GATHERS: dict[str, Use] = {
    "whole": lambda x, y: x.square().sum(),
    "vocabulary columns": lambda x, y: x[..., 3:5].sum(),
    "pairs": lambda x, y: (x * x).mean(),
    "matrix": lambda x, y: (x @ torch.ones(SIZE, 2)).square().sum(),
    "T": lambda x, y: x[0].T.square().sum(),
    "flat": lambda x, y: x.flatten()[::2].sum(),
    "max": lambda x, y: x.max(-1).values.sum(),
    "new dim": lambda x, y: x[..., None].square().sum(),
    "custom": lambda x, y: Cubed.apply(x),  # type: ignore[no-untyped-call]
}


class Cubed(torch.autograd.Function):
    """Reaches the tensor below Python's dispatch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum of cubes."""
        ctx.save_for_backward(x)
        return (x * x * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """3 x^2."""
        (x,) = ctx.saved_tensors
        slope: Tensor = 3 * gather_logits(x) ** 2
        return slope * grad


def parts(axis: TensorAxis) -> tuple[Tensor, Tensor, Vocabulary, Tensor]:
    """(whole leaf, this rank's leaf, vocabulary, labels with -100 among them)."""
    generator = torch.Generator().manual_seed(8)
    full = 3 * torch.randn(ROWS, LENGTH, SIZE, generator=generator)
    labels = torch.randint(0, SIZE, (ROWS, LENGTH), generator=generator)
    labels[1, 2] = -100
    widths = tuple(r.stop - r.start for r in cut_unevenly(SIZE, axis.size))
    vocabulary = Vocabulary(axis, widths)
    local = full.narrow(-1, vocabulary.start, vocabulary.width).clone()
    return full.requires_grad_(), local.requires_grad_(), vocabulary, labels


def use(kind: str) -> None:
    """Body of a rank: values, gradients, and whether the vocabulary was gathered."""
    comm = open_comm()
    axis = TensorAxis(comm)
    for name, function in (STAYS if kind == "stays" else GATHERS).items():
        full, local, vocabulary, labels = parts(axis)
        expected, found = function(full, labels), function(ShardedLogits.wrap(local * 1, vocabulary), labels)
        assert type(found) is Tensor, name
        bound = 2e-2 if name == "half" else 1e-6
        assert_close(found, expected, name, bound)
        torch.autograd.backward(expected.sum())
        torch.autograd.backward(found.sum())
        assert full.grad is not None and local.grad is not None, name
        assert_close(
            local.grad, full.grad.narrow(-1, vocabulary.start, vocabulary.width), name, bound, float(full.grad.max())
        )
        assert bool(vocabulary.gathers) == (kind == "gathers"), (name, vocabulary.gathers)
    labels_sent = {row.label for row in comm.tally.rows()}
    assert labels_sent == ({"loss"} if kind == "stays" else {"logits"}), labels_sent
    comm.close()


@pytest.mark.parametrize("kind", ["stays", "gathers"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_use_has_the_value_and_the_gradient_of_the_whole(run_ranks: RunRanks, kind: str, tp: int) -> None:
    run_ranks(use, tp, kind)


def refusals() -> None:
    """Body of a rank: writes and hooks; a label outside the vocabulary."""
    comm = open_comm()
    _, local, vocabulary, labels = parts(TensorAxis(comm))
    logits = ShardedLogits.wrap(local * 1, vocabulary)

    def iadd(x: Any) -> None:
        x += 1

    def setitem(x: Any) -> None:
        x[0] = 0

    def out(x: Any) -> None:
        torch.add(torch.ones(1), 1, out=x)

    writes: dict[str, Callable[[Any], Any]] = {
        "mul_": lambda x: x.mul_(2), "__setitem__": setitem, "add": out,
        "masked_fill_": lambda x: x.masked_fill_(x > 0, 0),
        "register_hook": lambda x: x.register_hook(print), "relu_": torch.relu_,
    }  # fmt: skip
    for name, write in writes.items():
        with pytest.raises(EngineError) as caught:
            write(logits)
        assert str(caught.value) == (
            f"{name} was called on logits with a vocabulary sharded over the tensor ranks, which are read-only and "
            "take no hooks; make a new tensor, or call engine.parallel.tensor.gather_logits on them first."
        ), name
    with pytest.raises(EngineError):
        iadd(logits)
    with pytest.raises(EngineError) as caught:
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(0) + SIZE)
    assert str(caught.value) == (
        f"a label is outside the vocabulary of {SIZE} rows; pass labels from 0 to {SIZE - 1}, or -100 to "
        "ignore a position."
    )
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with pytest.raises(EngineError) as caught:
        torch.autograd.grad(loss, local, create_graph=True)
    assert str(caught.value) == (
        "backward was called with create_graph = True, but layers that are sharded over tensor ranks have first "
        "derivatives only; set parallel.tensor to 1."
    )
    comm.close()


def test_writes_hooks_and_wrong_labels_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(refusals, 2)


def facts() -> None:
    """Body of a rank: what can be asked without communication."""
    comm = open_comm()
    _, local, vocabulary, _ = parts(TensorAxis(comm))
    logits: Any = ShardedLogits.wrap(local * 1, vocabulary)
    assert logits.shape == (ROWS, LENGTH, SIZE) and logits.size(-1) == SIZE and logits.dim() == 3
    assert len(logits) == ROWS
    assert logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.numel() == ROWS * LENGTH * SIZE
    assert logits.requires_grad and logits.grad_fn is not None and not logits.is_leaf and torch.is_tensor(logits)
    assert not logits.detach().requires_grad and isinstance(logits.detach(), ShardedLogits)
    assert logits.float() is logits and logits.bfloat16().dtype == torch.bfloat16
    start = vocabulary.start
    assert repr(logits) == (
        f"ShardedLogits(shape=(3, 4, 11), columns {start}:{start + vocabulary.width}, dtype=torch.float32, device=cpu)"
    )
    assert logits.type() == "torch.FloatTensor"
    assert not comm.tally.rows()
    assert gather_logits(logits) is gather_logits(logits) and vocabulary.gathers == ["whole"]
    with torch.no_grad():
        assert not gather_logits(logits).requires_grad
    comm.close()


def test_questions_about_shape_and_type_send_nothing(run_ranks: RunRanks) -> None:
    run_ranks(facts, 2)
