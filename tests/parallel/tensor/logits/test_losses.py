"""Losses of cut logits against torch on the whole ones: all tensor ranks as threads; what is sent against its plan."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import EngineError
from engine.kernels.dispatch import Kernels
from engine.parallel.tensor.layers.planned_traffic import find_logit_use
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits, gather_logits
from engine.parallel.tensor.plan.ranges import cut_unevenly
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.parallel.trace.tracer import trace_model
from tests.kernels.interpreter import repair
from tests.parallel.tensor.sharded import assert_close

Use = Callable[[Tensor, Tensor], Any]
BATCH, LENGTH, WIDTH = 3, 5, 4
TOKENS = BATCH * LENGTH


def labelled(**options: Any) -> Use:
    """Cross-entropy of [N, V]."""
    return lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), **options)


def weights(x: Tensor) -> Tensor:
    """By class."""
    return torch.linspace(0.5, 2.0, x.shape[-1])


def handwritten(x: Tensor, y: Tensor) -> Tensor:
    """As reinforcement learning code writes it."""
    picked = torch.gather(x, -1, y.clamp(0)[..., None]).squeeze(-1)
    return (torch.logsumexp(x, dim=-1) - picked).mul(y >= 0).sum()


def several(x: Tensor, y: Tensor) -> Tensor:
    """Three columns of each row of the log-probabilities."""
    return functional.log_softmax(x, dim=-1).gather(2, torch.stack([y.clamp(0), y.abs() % 3, y.clamp(0)], -1)).sum()


def hugging_face(x: Tensor, y: Tensor) -> Tensor:
    """Labels shifted by padding, the number of items given."""
    shifted = functional.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    flat = x.float().view(-1, x.shape[-1])
    total = functional.cross_entropy(flat, shifted.view(-1), ignore_index=-100, reduction="sum")
    return total / torch.tensor(7)


def penalized(x: Tensor, y: Tensor) -> Tensor:
    """Label smoothing and z-loss of the same logits."""
    flat = x.float().view(-1, x.shape[-1])
    smooth: Tensor = labelled(label_smoothing=0.1)(x.float(), y)
    return smooth + 1e-2 * (torch.logsumexp(flat, -1) ** 2).mean()


def measured(x: Tensor, y: Tensor) -> Tensor:
    """A metric before the loss, without gradients."""
    with torch.no_grad():
        torch.logsumexp(x, -1)
    loss: Tensor = labelled()(x, y)
    return loss


def chunked(x: Tensor, y: Tensor) -> Tensor:
    """In pieces of the sequence."""
    pieces = zip(x.chunk(3, dim=1), y.chunk(3, dim=1), strict=True)
    parts = [functional.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in pieces]
    return torch.stack(parts).sum()


LOSSES: dict[str, tuple[Use, float | None]] = {
    "mean": (labelled(), 3),
    "sum": (labelled(reduction="sum"), 3),
    "none": (labelled(reduction="none"), 3),
    "module": (lambda x, y: nn.CrossEntropyLoss(label_smoothing=0.2)(x.flatten(0, 1), y.flatten()), 4),
    "keywords": (lambda x, y: functional.cross_entropy(input=x.flatten(0, 1), target=y.flatten()), 3),
    "ignored": (lambda x, y: labelled(ignore_index=1)(x, y.clamp(0)), 3),
    "weighted": (lambda x, y: labelled(weight=weights(x))(x, y), 3),
    "weighted sum": (lambda x, y: labelled(weight=weights(x), reduction="sum")(x, y), 3),
    "weighted none": (lambda x, y: labelled(weight=weights(x), reduction="none")(x, y), 3),
    "smooth": (labelled(label_smoothing=0.1), 4),
    "smooth sum": (labelled(label_smoothing=0.3, reduction="sum"), 4),
    "smooth none": (labelled(label_smoothing=1.0, reduction="none"), 4),
    "smooth weighted": (lambda x, y: labelled(label_smoothing=0.1, weight=weights(x))(x, y), 4),
    "smooth weighted none": (
        lambda x, y: labelled(label_smoothing=0.1, weight=weights(x), reduction="none")(x, y), 4,
    ),
    "dims": (lambda x, y: functional.cross_entropy(x.transpose(1, 2), y), 3),
    "dims none": (lambda x, y: functional.cross_entropy(x.permute(0, 2, 1), y, reduction="none"), 3),
    "dims smooth": (lambda x, y: functional.cross_entropy(x.mT, y, weight=weights(x), label_smoothing=0.1), 4),
    "more dims": (
        lambda x, y: functional.cross_entropy(x.unsqueeze(1).movedim(-1, 1).contiguous(), y.unsqueeze(1)), 3,
    ),
    "one token": (lambda x, y: functional.cross_entropy(x[0, 0], y[0, 0]), None),
    "z": (lambda x, y: (torch.logsumexp(x, -1) ** 2).mean(), 2),
    "z kept": (lambda x, y: x.logsumexp((2,), keepdim=True).square().sum(), 2),
    "z other dim": (lambda x, y: x.transpose(0, 2).logsumexp(0).square().sum(), 2),
    "penalized": (penalized, 4),
    "z first": (lambda x, y: x.logsumexp(-1).square().mean() + functional.cross_entropy(x.transpose(1, 2), y), 3),
    "metric first": (measured, 3),
    "log_softmax nll": (lambda x, y: functional.nll_loss(x.flatten(0, 1).log_softmax(-1), y.flatten()), 4),
    "nll dims": (
        lambda x, y: nn.NLLLoss(weight=weights(x))(nn.LogSoftmax(dim=1)(x.transpose(1, 2)), y), 4,
    ),
    "nll none": (
        lambda x, y: functional.nll_loss(torch.log_softmax(x, -1).transpose(1, 2), y, reduction="none"), 4,
    ),
    "fp32 log_softmax": (
        lambda x, y: functional.log_softmax(x.flatten(0, 1), -1, dtype=torch.float32).gather(1, y.clamp(0).view(-1, 1)),
        4,
    ),
    "handwritten": (handwritten, 3),
    "several": (several, 2 + 3 + 1),
    "hugging face": (hugging_face, 3),
    "chunked": (chunked, 3),
    "tempered": (lambda x, y: labelled()(x / 0.7, y), 3),
    "biased": (lambda x, y: labelled()(weights(x) + x, y), 3),
    "masked": (lambda x, y: labelled()(x.masked_fill(weights(x) > 1.9, -30.0), y.clamp(max=0)), 3),
    "capped": (lambda x, y: labelled()(torch.tanh(x / 3) * 3, y), 3),
    "where": (lambda x, y: labelled()(torch.where(x > 5, torch.tensor(5.0), x), y), 3),
    "two": (lambda x, y: labelled()(x.bfloat16().float() + 0.5 * x, y), 3),
}  # fmt: skip


class Rank(NamedTuple):
    """What a rank holds of logits and labels."""

    whole: Tensor
    local: Tensor
    vocabulary: Vocabulary
    labels: Tensor


def rank_of(axis: TensorAxis, size: int) -> Rank:
    """Logits [B, S, V] and labels with -100 among them."""
    generator = torch.Generator().manual_seed(size)
    full = 3 * torch.randn(BATCH, LENGTH, size, generator=generator)
    labels = torch.randint(0, size, (BATCH, LENGTH), generator=generator)
    labels[1, 2], labels[0, 4] = -100, -100
    vocabulary = Vocabulary(axis, tuple(r.stop - r.start for r in cut_unevenly(size, axis.size)))
    local = full.narrow(-1, vocabulary.start, vocabulary.width).clone()
    return Rank(full.requires_grad_(), local.requires_grad_(), vocabulary, labels)


def sent(axis: Any) -> float:
    """fp32 scalars a token that the rank gave to sums."""
    assert all(call.op == "all_reduce" and call.label == "loss" for call in axis.called), axis.called
    return float(sum(torch.Size(call.shape).numel() * call.dtype.itemsize for call in axis.called)) / 4 / TOKENS


def compare(axis: TensorAxis, size: int, names: Iterable[str] = LOSSES) -> None:
    """Body of a rank: losses, their gradients, and their traffic."""
    for name in names:
        use, scalars = LOSSES[name]
        axis.called.clear()  # type: ignore[attr-defined]
        full, local, vocabulary, labels = rank_of(axis, size)
        expected, found = use(full, labels), use(ShardedLogits.wrap(local * 1, vocabulary), labels)
        assert type(found) is Tensor and found.dtype == expected.dtype, name
        assert_close(found, expected, name)
        slope = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape)
        torch.autograd.backward(expected, slope)
        torch.autograd.backward(found, slope)
        assert full.grad is not None and local.grad is not None
        mine = full.grad.narrow(-1, vocabulary.start, vocabulary.width)
        assert_close(local.grad, mine, name, floor=float(full.grad.abs().max()))
        assert not vocabulary.gathers, (name, vocabulary.gathers)
        assert scalars is None or sent(axis) == scalars, (name, sent(axis))


@pytest.mark.parametrize(("tp", "size"), [(2, 11), (2, 3), (4, 61), (4, 7), (4, 12), (3, 3)])
def test_losses_have_the_value_the_gradient_and_the_traffic(tp: int, size: int) -> None:
    run_tensor_ranks(tp, lambda axis: compare(axis, size))


def by_kernels(body: Callable[[Any], Any]) -> Callable[[TensorAxis], Any]:
    """The body of a rank whose losses Triton computes, interpreted."""
    repair()

    def run(axis: TensorAxis) -> Any:
        axis.kernels = Kernels("triton")
        return body(axis)

    return run


def test_losses_by_kernels_have_them_too() -> None:
    """Every term, alone and together, shared and not."""
    names = ("ignored", "smooth weighted none", "dims smooth", "z", "penalized", "z first", "log_softmax nll")
    run_tensor_ranks(2, by_kernels(lambda axis: compare(axis, 11, names)))


def odd(axis: TensorAxis) -> list[Any]:
    """Body of a rank: nothing to count, infinite logits, narrow dtypes, labels that do not exist."""
    full, local, vocabulary, labels = rank_of(axis, 11)
    nothing = functional.cross_entropy(ShardedLogits.wrap(local * 1, vocabulary).mT, labels.fill_(-100))
    torch.autograd.backward(nothing)
    assert nothing.isnan() and local.grad is not None
    zero = functional.cross_entropy(ShardedLogits.wrap(local * 1, vocabulary).mT, labels, reduction="sum")
    masked = full.detach().clone()
    masked[0], masked[1, :, :6], masked[2, :, 4:] = -torch.inf, -torch.inf, -torch.inf
    part = masked.narrow(-1, vocabulary.start, vocabulary.width)
    assert torch.equal(ShardedLogits.wrap(part, vocabulary).logsumexp(-1).isinf(), masked.logsumexp(-1).isinf())
    assert_close(ShardedLogits.wrap(part, vocabulary).logsumexp(-1)[1:], masked.logsumexp(-1)[1:], "masked")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        narrow, ours = full.detach().to(dtype), ShardedLogits.wrap(local.detach().to(dtype), vocabulary)
        labels.fill_(3)
        pairs = [(functional.cross_entropy(x.flatten(0, 1), labels.flatten()), x.logsumexp(-1)) for x in (ours, narrow)]
        for mine, theirs in zip(*pairs, strict=True):
            assert mine.dtype == theirs.dtype == dtype
            assert_close(mine, theirs, str(dtype), 1e-2)
        exact = functional.cross_entropy(narrow.float().flatten(0, 1), labels.flatten())
        computed = functional.cross_entropy(ours.float().flatten(0, 1), labels.flatten())
        assert_close(computed, exact, f"{dtype} in fp32")
        with torch.autocast("cpu", enabled=dtype == torch.bfloat16):
            assert functional.cross_entropy(ours.mT, labels).dtype == functional.cross_entropy(narrow.mT, labels).dtype
            assert functional.nll_loss(ours.mT, labels).dtype == functional.nll_loss(narrow.mT, labels).dtype
            assert ours.logsumexp(-1).dtype == narrow.logsumexp(-1).dtype
            assert ours.log_softmax(-1).dtype == narrow.log_softmax(-1).dtype
    return [float(zero.detach())]


def test_nothing_to_count_masks_and_narrow_logits() -> None:
    assert run_tensor_ranks(2, odd) == [[0.0]] * 2
    assert run_tensor_ranks(2, by_kernels(odd)) == [[0.0]] * 2


class Stored:
    """Elements of what autograd keeps for a backward."""

    def __init__(self) -> None:
        self.elements: list[int] = []

    def pack(self, x: Tensor) -> Tensor:
        self.elements.append(x.numel() * (x.dtype == torch.float32))
        return x


def test_kernels_keep_no_softmax() -> None:
    def body(axis: TensorAxis, mode: Any) -> int:
        axis.kernels = Kernels(mode)
        _, local, vocabulary, labels = rank_of(axis, 11)
        stored = Stored()
        with torch.autograd.graph.saved_tensors_hooks(stored.pack, lambda x: x):
            labelled()(ShardedLogits.wrap(local.detach().bfloat16().requires_grad_(), vocabulary), labels)
        return max(stored.elements)

    repair()
    widths = [6 * TOKENS, 5 * TOKENS]
    assert run_tensor_ranks(2, lambda axis: body(axis, "reference")) == widths
    assert run_tensor_ranks(2, lambda axis: body(axis, "triton")) == [TOKENS] * 2


def wrong(axis: TensorAxis) -> None:
    """Body of a rank."""
    _, local, vocabulary, labels = rank_of(axis, 11)
    logits = ShardedLogits.wrap(local * 1, vocabulary)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: functional.cross_entropy(logits.mT, labels + 11, label_smoothing=0.1),
        lambda: functional.nll_loss(logits.mT, labels + 11),
    )
    for use in uses:
        with pytest.raises(EngineError) as caught:
            use()
        assert str(caught.value) == (
            "a label is outside the vocabulary of 11 rows; pass labels from 0 to 10, or -100 to ignore a position."
        )
    with pytest.raises(EngineError) as caught:
        logits.gather(-1, labels[..., None])
    assert str(caught.value) == "an index of gather is outside the vocabulary of 11 rows; pass indices from 0 to 10."
    with pytest.raises(EngineError, match="first derivatives only"):
        torch.autograd.grad(logits.logsumexp(-1).sum(), local, create_graph=True)


def test_labels_that_do_not_exist_are_refused() -> None:
    run_tensor_ranks(2, wrong)


class Operands(nn.Module):
    """What is learned beside the head: a temperature, a bias, a scale of every token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.bias = nn.Parameter(torch.linspace(-1, 1, size))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, LENGTH).view(1, LENGTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A loss that all of them change."""
        return functional.cross_entropy(((x / self.temperature + self.bias) * self.scale).flatten(0, 1), y.flatten())


def learned(axis: TensorAxis) -> list[Any]:
    """Body of a rank: gradients of replicated operands are those of the whole."""
    full, local, vocabulary, labels = rank_of(axis, 11)
    theirs, ours = Operands(11), Operands(11)
    torch.autograd.backward(theirs(full, labels))
    torch.autograd.backward(ours(ShardedLogits.wrap(local * 1, vocabulary), labels))
    for (name, expected), found in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        assert_close(found.grad, expected.grad, name)
    assert not vocabulary.gathers
    return [call[:3] for call in axis.called if call.label != "loss"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_learned_beside_the_head_has_the_gradient_of_the_whole(tp: int) -> None:
    widest = -(-11 // tp)
    calls = [
        ("all_reduce", "logit operands", (1, LENGTH, 1)),
        ("all_gather", "logit operands", (widest,)),
        ("all_reduce", "logit operands", ()),
    ]
    assert run_tensor_ranks(tp, learned) == [calls] * tp


class Head(nn.Module):
    """Logits of a vocabulary, in a module or in one more around it, and a bias that is added outside."""

    def __init__(self, size: int, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, size), nn.Identity()) if inside else nn.Linear(WIDTH, size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        logits: Tensor = self.head(self.body(x)) + self.bias
        return logits


GATHERS: dict[str, tuple[Use, list[str]]] = {
    "softmax": (lambda x, y: x.softmax(-1).square().sum() + labelled()(x, y), ["softmax"]),
    "sums": (lambda x, y: x.mT.sum() + x.bfloat16().float().sum() + x.sum(), ["sum"]),
    "positions": (lambda x, y: x.square().mean() * torch.where(x > 0)[0].sum(), ["mean", "where"]),
    "topk": (lambda x, y: x.topk(2, -1).values.sum() + x.max(), ["topk"]),
    "accuracy": (lambda x, y: labelled()(x, y) + 0 * (x.detach().argmax(-1) == y).sum(), ["argmax"]),
    "probabilities": (
        lambda x, y: functional.cross_entropy(x.flatten(0, 1), torch.full((TOKENS, x.shape[-1]), 0.1)),
        ["cross_entropy"],
    ),
    "masked rows": (lambda x, y: functional.cross_entropy(x[y >= 0], y[y >= 0]) + x[y >= 0].square().mean(), ["mean"]),
}


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", [*LOSSES, *GATHERS])
def test_the_plan_of_a_loss_is_what_it_sends(name: str, inside: bool) -> None:
    """Every rule is planned on shapes by itself; the bytes must be those of the run."""
    size, tp = 11, 4
    use, gathers = GATHERS[name] if name in GATHERS else (LOSSES[name][0], [])
    labels = _labels(size)
    model, x = Head(size, inside), torch.randn(BATCH, LENGTH, WIDTH)
    plan = find_tensor_plan(model, {"head.0" if inside else "head": "vocabulary"}, tp)
    timeline = trace_model(model, lambda: use(model(x), labels).sum())
    planned = find_logit_use(plan, timeline, tp)

    def run(axis: TensorAxis) -> list[Any]:
        vocabulary = Vocabulary(axis, tuple(r.stop - r.start for r in cut_unevenly(size, tp)))
        logits = model(x).detach()
        local = logits.narrow(-1, vocabulary.start, vocabulary.width).requires_grad_()
        bias = model.bias.detach().clone().requires_grad_()
        found = use(ShardedLogits.wrap(local * 1, vocabulary) + bias, labels).sum()
        torch.autograd.backward(found)
        wide = {"all_gather": tp, "all_reduce": 1}
        calls = axis.called  # type: ignore[attr-defined]
        return sorted((c.op, c.label, torch.Size(c.shape).numel() * c.dtype.itemsize * wide[c.op]) for c in calls)

    expected = sorted((call.op, call.label, call.bytes) for call in planned.sent)
    assert run_tensor_ranks(tp, run) == [expected] * tp
    assert [where.split(" at ")[0] for where in planned.gathers] == gathers
    assert all("test_losses.py:" in where for where in planned.gathers)


def _labels(size: int) -> Tensor:
    labels = torch.arange(TOKENS).view(BATCH, LENGTH) % size
    labels[1, 2], labels[0, 4] = -100, -100
    return labels


def stays(axis: TensorAxis) -> None:
    """Body of a rank: values of functions that give cut logits again."""
    full, local, vocabulary, _ = rank_of(axis, 11)
    rows = torch.tensor([2, 0])
    uses: dict[str, Callable[[Tensor], Any]] = {
        "T": lambda x: x[0].T, "t": lambda x: x[0].t(), "swapaxes": lambda x: x.swapaxes(0, 2),
        "permute": lambda x: torch.permute(x, (2, 0, 1)), "movedim": lambda x: x.movedim(-1, 0),
        "unsqueeze": lambda x: x.unsqueeze(-1), "squeeze": lambda x: x[:1].unsqueeze(1).squeeze(),
        "squeeze dim": lambda x: x[:, :1].squeeze(1), "narrow": lambda x: x.narrow(1, 1, 2),
        "select": lambda x: x.mT.select(0, 1), "index_select": lambda x: x.index_select(0, rows),
        "chunk": lambda x: x.chunk(2, dim=1)[1], "names": lambda x: torch.unsqueeze(input=x.chunk(chunks=2)[0], dim=0),
        "split": lambda x: cast(Any, x).mT.split([1, 2], dim=0)[1],
        "flatten": lambda x: x.movedim(-1, 0).flatten(1), "flatten first": lambda x: x.unsqueeze(0).mT.flatten(0, 1),
        "view": lambda x: x.view(1, TOKENS, -1), "index": lambda x: x[rows, :, :],
        "compare": lambda x: (x >= 1).float() + (x != x).float(), "rdiv": lambda x: 2 / (x * x + 1),
        "radd": lambda x: torch.ones(11) + x, "where": lambda x: torch.where(x > 0, x, x * 0.1),
        "pattern": lambda x: torch.ones(3, dtype=torch.float64).type_as(x).expand(3),
    }  # fmt: skip
    for name, use in uses.items():
        found = use(ShardedLogits.wrap(local * 1, vocabulary))
        assert not axis.called and (name == "pattern" or isinstance(found, ShardedLogits)), name  # type: ignore[attr-defined]
        assert found.shape == use(full).shape, name
        assert torch.equal(gather_logits(found), use(full)), name
        axis.called.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("tp", [2, 4])
def test_order_of_dims_rows_and_numbers_send_nothing(tp: int) -> None:
    run_tensor_ranks(tp, stays)
