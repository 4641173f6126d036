"""Linear cross-entropy by chunks: error against eager torch's, gradients, and the largest tensor it ever makes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.errors import EngineError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops import linear_cross_entropy as module
from engine.kernels.ops.cross_entropy import CrossEntropy, Question, Softmax
from engine.kernels.ops.linear_cross_entropy import Conditions, Head, chunk_tokens, linear_cross_entropy, linear_terms
from tests.kernels.error import check_error
from tests.selection import wide

DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
MODES = ("reference", "triton")
CHUNK = 8
SHAPES = ((21, 16, 37), (8, 12, 40), (0, 8, 9), (3, 8, 50))
"""Tokens, width, vocabulary: chunks that are not full, exactly one, none."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_CHUNK", CHUNK)
    monkeypatch.setattr(module, "FAST_CHUNK", CHUNK)


def eager(hidden: Tensor, weight: Tensor, target: Tensor, form: CrossEntropy, bias: Tensor | None = None) -> Tensor:
    """As models write it: all logits."""
    return functional.cross_entropy(
        functional.linear(hidden, weight, bias),
        target,
        ignore_index=form.ignore_index,
        reduction=form.reduction,
        label_smoothing=form.label_smoothing,
    )


def made(sizes: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """(hidden, weight, bias), targets of which every fifth is left out."""
    tokens, width, vocabulary = sizes
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(size, generator=generator) for size in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    target[::5] = -100
    return [hidden.to(dtype), (2 * weight / width**0.5).to(dtype), bias.to(dtype)], target


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_eager_torchs(
    dtype: torch.dtype, reduction: Any, sizes: tuple[int, int, int], mode: Any
) -> None:
    given, target = made(sizes, dtype)
    form, kernels = CrossEntropy(label_smoothing=0.1 if sizes[1] == 16 else 0.0, reduction=reduction), Kernels(mode)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, bias, target, form, kernels).to(dtype)

    check_error(ours, lambda hidden, weight, bias: eager(hidden, weight, target, form, bias), given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1.0, -3.0])
def test_a_mean_is_scaled_by_what_comes_in(scale: float, mode: Any) -> None:
    """No bias, hidden states that something else uses too, a backward that is run twice."""
    (hidden, weight, _), target = made((21, 16, 37), torch.float32)
    leaves = [[t.clone().requires_grad_() for t in (hidden, weight)] for _ in range(2)]
    form = CrossEntropy(label_smoothing=0.1)
    losses: list[Tensor] = []
    for number, (x, w) in enumerate(leaves):
        loss = linear_cross_entropy(x, w, None, target, form, Kernels(mode)) if number else eager(x, w, target, form)
        losses.append(loss)
        total = scale * loss + x.square().sum() + w.sum()
        total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(losses[1], losses[0])
    for mine, its in zip(leaves[1], leaves[0], strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_may_lie_apart(reduction: Any, mode: Any) -> None:
    (hidden, weight, bias), _ = made((21, 16, 37), torch.float32)
    target = torch.randint(0, 37, (21, 3), generator=torch.Generator().manual_seed(2))[:, 1]
    form = CrossEntropy(reduction=reduction)
    found = linear_cross_entropy(hidden.requires_grad_(), weight, bias, target, form, Kernels(mode))
    expected = eager(hidden, weight, target, form, bias)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss.sum(), hidden)[0] for loss in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("mode", MODES)
def test_small_shares_of_the_softmax_count_in_fp16_as_they_do_with_a_loss_scale(mode: Any) -> None:
    hidden, weight = torch.ones(4, 8, dtype=torch.float16), torch.zeros(64, 8, dtype=torch.float16)
    weight[0] = 2.25  # the other 63 rows have a share of e^-18, less than the least of fp16's numbers
    target, scale = torch.zeros(4, dtype=torch.int64), 65536.0
    leaf = weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, leaf, None, target, CrossEntropy(), Kernels(mode))
    (found,) = torch.autograd.grad(scale * loss, leaf)
    wide = weight.double().requires_grad_()
    exact = functional.cross_entropy(hidden.double() @ wide.t(), target)
    (expected,) = torch.autograd.grad(scale * exact, wide)
    # of the target's own row nothing is left but the rounding of 1 - 1
    torch.testing.assert_close(found[1:].double(), expected[1:], rtol=0.05, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_to_count_has_torchs_value_and_no_gradient(reduction: Any) -> None:
    given, target = made((9, 8, 11), torch.float32)
    hidden, weight, bias = (t.requires_grad_() for t in given)
    target.fill_(-100)
    loss = linear_cross_entropy(hidden, weight, bias, target, CrossEntropy(reduction=reduction), Kernels("reference"))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.isnan() if reduction == "mean" else not loss.detach().any()
    assert all(t.grad is not None and not t.grad.any() for t in (hidden, weight, bias))


def test_reference_has_the_gradients_of_finite_differences() -> None:
    given, target = made((10, 3, 5), torch.float64)
    leaves = tuple(t.requires_grad_() for t in given)
    for reduction in ("none", "sum", "mean"):
        form = CrossEntropy(label_smoothing=0.2, reduction=reduction)
        use = partial(linear_cross_entropy, target_N=target, form=form, kernels=Kernels("reference"))
        assert torch.autograd.gradcheck(use, leaves)


def test_terms_have_the_gradients_of_finite_differences() -> None:
    given, target = made((10, 3, 5), torch.float64)
    leaves = tuple(t.requires_grad_() for t in given)
    weights = torch.linspace(0.5, 1, 5, dtype=torch.float64)
    question = Question(target.clamp(0), weights)

    def terms(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        _, log_sum, picked, weighted = linear_terms(
            hidden, Head(weight, bias), question, Conditions(Kernels("reference"))
        )
        assert picked is not None and weighted is not None
        return log_sum - picked, log_sum * weights.sum() - weighted  # in which the largest cancels

    assert torch.autograd.gradcheck(terms, leaves)


def test_what_is_known_is_used_again() -> None:
    given, target = made((10, 3, 5), torch.float32)
    head = Head(given[1], given[2])
    first = linear_terms(given[0], head, Question(), Conditions(Kernels("reference")))
    known = Softmax(first.largest, first.log_sum)
    again = linear_terms(given[0], head, Question(target.clamp(0)), Conditions(Kernels("reference"), None, known))
    assert again.picked is not None and torch.equal(again.log_sum, first.log_sum)
    logits = head.logits(given[0])
    picked = logits.gather(1, target.clamp(0)[:, None]).squeeze(1) - logits.amax(1)
    torch.testing.assert_close(again.picked, picked)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_nothing(frozen: int) -> None:
    given, target = made((21, 8, 11), torch.float32)
    for number, tensor in enumerate(given):
        tensor.requires_grad_(number != frozen)
    hidden, weight, bias = given
    loss = linear_cross_entropy(hidden, weight, bias, target, CrossEntropy(), Kernels("reference"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert [tensor.grad is None for tensor in given] == [number == frozen for number in range(3)]


def test_under_autocast_the_product_is_in_its_dtype() -> None:
    given, target = made((21, 8, 11), torch.float32)
    hidden, weight, bias = (t.requires_grad_() for t in given)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, bias, target, CrossEntropy(), Kernels("reference"))
        logits = functional.linear(hidden, weight, bias)
    torch.testing.assert_close(found, functional.cross_entropy(logits.float(), target))
    found.backward()  # type: ignore[no-untyped-call]
    assert found.dtype == torch.float32 and all(t.grad is not None and t.grad.dtype == t.dtype for t in given)


def test_targets_outside_the_vocabulary_are_refused() -> None:
    given, target = made((21, 8, 11), torch.float32)
    with pytest.raises(EngineError, match="a label is outside the vocabulary of 11 rows"):
        linear_cross_entropy(given[0], given[1], None, target + 11, CrossEntropy(), Kernels("reference"))


@pytest.mark.parametrize("sizes", [(16384, 4096, 131072), (1, 1, 1), (4096, 4096, 4096), (100, 8, 100_000)])
def test_a_chunks_logits_take_about_the_bytes_of_the_hidden_states(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    tokens, width, vocabulary = sizes
    size = chunk_tokens(tokens, width, vocabulary)
    least = max(256, width // 2, min(tokens // 4, 2048))
    assert size >= least and size & (size - 1) == 0
    assert size < 2 * least or tokens * width <= size * vocabulary < 2 * tokens * width


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_ever_holds_all_logits(reduction: Any, mode: Any) -> None:
    tokens, width, vocabulary = 32, 4, 40
    given, target = made((tokens, width, vocabulary), torch.float32)
    hidden, weight, _ = (t.requires_grad_() for t in given)
    form = CrossEntropy(reduction=reduction)

    def most(loss: Callable[[], Tensor]) -> int:
        seen = Largest()
        with seen:
            torch.autograd.backward(loss().sum())
        return seen.elements

    assert most(lambda: eager(hidden, weight, target, form)) >= tokens * vocabulary
    ours = most(lambda: linear_cross_entropy(hidden, weight, None, target, form, Kernels(mode)))
    assert ours == CHUNK * vocabulary


def test_a_weight_gradient_of_many_chunks_is_rounded_once() -> None:
    """64 chunks of equal tokens: summed in bf16, the later ones would be rounded away in part."""
    tokens, columns = 64 * CHUNK, 512
    hidden = torch.full((tokens, 8), 0.7, dtype=torch.bfloat16)
    weight = torch.zeros(columns, 8, dtype=torch.bfloat16, requires_grad=True)
    assert chunk_tokens(tokens, 8, columns) == CHUNK
    target, form = torch.zeros(tokens, dtype=torch.int64), CrossEntropy(reduction="sum")
    linear_cross_entropy(hidden, weight, None, target, form, Kernels("reference")).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    share = torch.tensor(1 / columns - 1).bfloat16().float()  # of the target, in the dtype of the logits
    assert torch.equal(weight.grad[0], (share * hidden[0].float() * tokens).bfloat16())
