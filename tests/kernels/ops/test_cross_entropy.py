"""Cross-entropy of whole logits: the reference against float64, the interpreted kernels against eager torch's error."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases.whole_logits import cross_entropy
from engine.errors import EngineError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.cross_entropy import (
    CrossEntropy,
    Question,
    Slopes,
    find_gradient,
    find_statistics,
    gradient_reference,
    join_softmax_terms,
    statistics_reference,
)
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
FORMS = {
    "plain": CrossEntropy(1, reduction="none"),
    "smooth": CrossEntropy(1, 0.1, "none"),
    "only smoothing": CrossEntropy(-100, 1.0, "none"),
}
SHAPES = ((24, 61), (5, 130), (0, 9), (3, 2))
MODES = ("reference", "triton")


def eager(logits: Tensor, target: Tensor, form: CrossEntropy) -> Tensor:
    """As models write it."""
    return functional.cross_entropy(
        logits,
        target,
        ignore_index=form.ignore_index,
        reduction=form.reduction,
        label_smoothing=form.label_smoothing,
    )


def made(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of about the scale of a trained model, targets with some that are left out (1)."""
    generator = torch.Generator().manual_seed(rows + width)
    logits = 3 * torch.randn(rows, width, generator=generator)
    target = torch.randint(0, width, (rows,), generator=generator)
    target[::4] = min(1, width - 1)
    return logits.to(dtype), target


def kernels(mode: Any) -> Kernels:
    return Kernels(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_eager_torchs(
    dtype: torch.dtype, form: CrossEntropy, shape: tuple[int, int], mode: str
) -> None:
    logits, target = made(*shape, dtype)
    check_error(lambda x: cross_entropy(x, target, form, kernels(mode)), lambda x: eager(x, target, form), [logits])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_means_leave_out_what_is_ignored(dtype: torch.dtype, reduction: Any, mode: str) -> None:
    logits, target = made(24, 61, dtype)
    form = CrossEntropy(1, 0.1, reduction)
    mine, its = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, expected = cross_entropy(mine, target, form, kernels(mode)), eager(its, target, form)
    assert found.dtype == dtype and found.shape == ()
    torch.testing.assert_close(found, expected.to(dtype))
    torch.autograd.backward((found, expected))
    assert its.grad is not None
    torch.testing.assert_close(mine.grad, its.grad.to(dtype))
    assert mine.grad is not None and not mine.grad[target == 1].any() and bool(mine.grad[target != 1].any())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_count_has_torchs_value_and_no_gradient(mode: str) -> None:
    logits, target = made(3, 9)
    logits.requires_grad_()
    target.fill_(-100)
    loss = cross_entropy(logits, target, CrossEntropy(), kernels(mode))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isnan() and logits.grad is not None and not logits.grad.any()
    assert not cross_entropy(logits, target, CrossEntropy(reduction="sum"), kernels(mode)).detach()


def test_a_vocabulary_of_several_blocks_is_read_to_its_end() -> None:
    """More than 250,000 columns, the largest value in the last one, targets in the first and the last."""
    width = 250_007
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    logits[:, -1] = 9.0
    target = torch.tensor([0, width - 1])
    for form in (CrossEntropy(reduction="none"), CrossEntropy(label_smoothing=0.3, reduction="none")):
        check_error(
            lambda x, form=form: cross_entropy(x, target, form, kernels("triton")),
            lambda x, form=form: eager(x, target, form),
            [logits],
        )


def test_rows_may_lie_apart() -> None:
    wide, target = made(6, 80)
    view = wide[:, 5:42]
    target = target % 37
    found = cross_entropy(view, target, FORMS["smooth"], kernels("triton"))
    torch.testing.assert_close(found, eager(view, target, FORMS["smooth"]))
    torch.testing.assert_close(
        cross_entropy(view.t()[:6, :6], target[:6] % 6, FORMS["plain"], kernels("triton")),
        eager(view.t()[:6, :6], target[:6] % 6, FORMS["plain"]),
    )


@pytest.mark.parametrize("form", [FORMS["plain"], FORMS["smooth"]], ids=str)
def test_targets_may_lie_apart_and_gradients_be_one_number(form: CrossEntropy) -> None:
    logits, _ = made(6, 37)
    table = torch.randint(0, 37, (6, 5), generator=torch.Generator().manual_seed(2))
    for target in (table[:, 2], table[0, :1].expand(6)):
        check_error(
            lambda x, t=target: cross_entropy(x, t, form, kernels("triton")).sum(),
            lambda x, t=target: eager(x, t, form).sum(),
            [logits],
        )


INFINITE = {
    "masked": (-torch.inf, slice(0, 5)),
    "masked to the target": (-torch.inf, slice(0, 9)),
    "all but one": (-torch.inf, slice(0, 16)),
    "not a number": (torch.nan, slice(3, 4)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INFINITE)
def test_what_is_not_finite_is_as_in_torch(name: str, mode: str) -> None:
    value, where = INFINITE[name]
    logits = torch.randn(2, 17, generator=torch.Generator().manual_seed(2)) + 100
    logits[0, where] = value
    target = torch.tensor([8, 16])
    mine, its = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, expected = cross_entropy(mine, target, FORMS["plain"], kernels(mode)), eager(its, target, FORMS["plain"])
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.autograd.backward((found.sum(), expected.sum()))
    torch.testing.assert_close(mine.grad, its.grad, equal_nan=True)


def test_an_ignored_row_has_no_gradient_whatever_it_holds() -> None:
    logits, target = made(4, 17)
    logits[2] = torch.nan
    target[:] = torch.tensor([3, 4, -100, 5])
    logits.requires_grad_()
    loss = cross_entropy(logits, target, CrossEntropy(reduction="sum"), kernels("triton"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite() and logits.grad is not None and not logits.grad[2].any()


def test_reference_has_the_gradients_of_finite_differences() -> None:
    logits, target = made(5, 7, torch.float64)
    for form in FORMS.values():
        use = partial(cross_entropy, target_N=target, form=form, kernels=kernels("triton"))  # doubles go to torch
        assert torch.autograd.gradcheck(use, (logits.clone().requires_grad_(),))


def test_targets_outside_the_vocabulary_are_refused() -> None:
    logits, target = made(4, 9)
    with pytest.raises(EngineError) as caught:
        cross_entropy(logits, target + 9, CrossEntropy(), kernels("triton"))
    assert str(caught.value) == (
        "a label is outside the vocabulary of 9 rows; pass labels from 0 to 8, or -100 to ignore a position."
    )


def test_same_bits_twice() -> None:
    logits, target = made(9, 5000, torch.bfloat16)
    logits.requires_grad_()

    def gradient() -> Tensor:
        loss = cross_entropy(logits, target, CrossEntropy(label_smoothing=0.1), kernels("triton"))
        (found,) = torch.autograd.grad(loss, logits)
        return found

    assert torch.equal(gradient(), gradient())


QUESTIONS = {
    "softmax": (False, False, False),
    "picked": (True, False, False),
    "weighted": (True, True, False),
    "even": (True, False, True),
}


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_parts_of_the_columns_join_to_the_whole(name: str, triton: bool) -> None:
    """Statistics of three parts, of very different largest values, joined as three ranks would."""
    logits, target = made(6, 50)
    logits[:, 20:40] += torch.tensor([0, 300.0, -300, 50, -torch.inf, 0])[:, None]
    targeted, weighted, even = QUESTIONS[name]
    weight = torch.linspace(0.5, 2, 50) if weighted else None
    bounds = ((0, 20), (20, 40), (40, 50))
    questions = [
        Question(target if targeted else None, None if weight is None else weight[a:b], even, a) for a, b in bounds
    ]
    parts = [logits[:, a:b] for a, b in bounds]
    found = [find_statistics(part, asked, triton) for part, asked in zip(parts, questions, strict=True)]
    whole_question = Question(target if targeted else None, weight, even)
    whole_found = statistics_reference(logits, whole_question)
    expected = join_softmax_terms(whole_found, whole_question, 50, None)
    rounds: list[list[Tensor]] = [[], []]

    class Noted:
        """First what each part gives, then what all together give."""

        def __init__(self, answers: list[Tensor] | None = None) -> None:
            self.answers = answers

        def largest(self, values: Tensor) -> None:
            rounds[0].append(values.clone())
            if self.answers:
                values.copy_(self.answers[0])

        def sum(self, values: Tensor) -> None:
            rounds[1].append(values.clone())
            if self.answers and len(self.answers) > 1:
                values.copy_(self.answers[1])

    def run(answers: list[Tensor] | None) -> Any:
        for seen in rounds:
            seen.clear()
        return [
            join_softmax_terms(own, asked, b - a, Noted(answers))
            for own, asked, (a, b) in zip(found, questions, bounds, strict=True)
        ]

    run(None)
    most = torch.stack(rounds[0]).amax(0)
    run([most])
    results = run([most, torch.stack(rounds[1]).sum(0)])
    for softmax, picked, weighted_sum in results:
        for mine, whole in zip((*softmax, picked, weighted_sum), (*expected[0], *expected[1:]), strict=True):
            assert (mine is None) == (whole is None)
            if mine is not None and whole is not None:
                torch.testing.assert_close(mine, whole)
    slopes = Slopes(
        torch.linspace(0.5, 1, 6),
        torch.linspace(-1, 1, 6) if targeted else None,
        torch.linspace(0, 2, 6) if weighted or even else None,
    )
    whole_grad = gradient_reference(logits, whole_question, expected[0], slopes)
    for part, asked, (a, b) in zip(parts, questions, bounds, strict=True):
        torch.testing.assert_close(find_gradient(part, asked, expected[0], slopes, triton), whole_grad[:, a:b])
        if triton:
            spoiled = part.clone()
            find_gradient(spoiled, asked, expected[0], slopes, triton, inplace=True)
            torch.testing.assert_close(spoiled, whole_grad[:, a:b])


def test_operators_are_registered_as_torch_wants_them() -> None:
    logits, target = made(5, 32)
    ops: Any = torch.ops.trine
    one = torch.ones(5)
    check_operator(ops.softmax_statistics.default, (logits, target, None, True, 0))
    check_operator(ops.softmax_statistics.default, (logits, None, torch.ones(32), False, 0))
    given = logits, target, None, one, one, one, one, one, 0
    check_operator(ops.softmax_gradient.default, given)
    check_operator(ops.softmax_gradient_.default, given)
