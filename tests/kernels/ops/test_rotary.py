"""Rotary embedding: reference and interpreted kernels against models' code and its error."""

from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as turn_halves
from transformers.models.gptj.modeling_gptj import rotate_every_two

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.rotary import Rotary, rotary
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

TRITON = Kernels("triton")
DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
FORMS = {
    "halves": Rotary(),
    "neighbours": Rotary(interleaved=True),
    "halves, heads last": Rotary(heads_dim=2),
    "neighbours, heads last": Rotary(interleaved=True, heads_dim=2),
}
SIZES = {"all features": (2, 3, 2, 5, 8, 8), "some features": (1, 2, 4, 3, 13, 6), "no position": (2, 1, 1, 0, 4, 4)}
"""B, heads of q, heads of k, S, D, R"""


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: Rotary) -> tuple[Tensor, Tensor]:
    """As models write it."""
    if not form.interleaved:
        turned: tuple[Tensor, Tensor] = turn_halves(q, k, cos, sin, form.heads_dim)  # type: ignore[no-untyped-call]
        return turned
    cos, sin, features = cos.unsqueeze(form.heads_dim), sin.unsqueeze(form.heads_dim), cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        first = x[..., :features]
        return torch.cat((first * cos + rotate_every_two(first) * sin, x[..., features:]), dim=-1)

    return turn(q), turn(k)


def made(
    sizes: tuple[int, ...], dtype: torch.dtype, form: Rotary, batched: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, cos, sin: the parts of cos and sin that meet one pair of features differ."""
    batch, q_heads, k_heads, length, features, turned = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    q, k = (torch.randn(batch, heads, length, features, generator=generator) for heads in (q_heads, k_heads))
    angles = torch.randn(batch if batched else 1, length, turned, generator=generator)
    q, k = q.transpose(1, form.heads_dim), k.transpose(1, form.heads_dim)
    return q.to(dtype), k.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_that_of_models_code(
    dtype: torch.dtype, form: Rotary, sizes: tuple[int, ...], mode: Literal["reference", "triton"]
) -> None:
    kernels = Kernels(mode)
    q, k, cos, sin = made(sizes, dtype, form)
    wide = {t.dtype: (t, u) for t, u in ((cos, sin), (cos.double(), sin.double()))}
    check_error(
        lambda q, k: rotary(q, k, *wide[q.dtype], form, kernels), lambda q, k: eager(q, k, *wide[q.dtype], form), [q, k]
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_one_row_of_angles_serves_all_sequences(form: Rotary) -> None:
    given = made((3, 2, 1, 4, 6, 6), torch.float32, form, batched=False)
    for found, expected in zip(rotary(*given, form, TRITON), eager(*given, form), strict=True):
        torch.testing.assert_close(found, expected)


def test_pieces_of_a_fused_product_are_read_where_they_lie_and_keep_their_order() -> None:
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(2, 5, 3 * 4 * 8, generator=generator)
    q, k, _ = (x.view(2, 5, 4, 8).transpose(1, 2) for x in fused.chunk(3, dim=-1))
    _, _, cos, sin = made((2, 4, 4, 5, 8, 8), torch.float32, Rotary())
    assert not q.is_contiguous()
    given = q, k, cos, sin
    for found, expected in zip(rotary(*given, Rotary(), TRITON), eager(*given, Rotary()), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.transpose(1, 2).is_contiguous(), "as the projection wrote it"


def test_features_that_lie_apart_are_copied_first() -> None:
    q, k, cos, sin = made((2, 3, 2, 5, 8, 8), torch.float32, Rotary())
    q, k, cos = (t.mT.contiguous().mT for t in (q, k, cos))
    given = q, k, cos, sin
    for found, expected in zip(rotary(*given, Rotary(), TRITON), eager(*given, Rotary()), strict=True):
        torch.testing.assert_close(found, expected)


def test_angles_that_are_learned_get_their_gradients() -> None:
    given = made((1, 2, 1, 3, 4, 4), torch.float32, Rotary())
    for tensor in given:
        tensor.requires_grad_()

    def gradients(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(pair[0].square().sum() + pair[1].square().sum(), given)

    found = gradients(rotary(*given, Rotary(), TRITON))
    for one, other in zip(found, gradients(eager(*given, Rotary())), strict=True):
        torch.testing.assert_close(one, other)


def test_other_dtypes_of_angles_promote_as_in_torch() -> None:
    q, k, cos, sin = made((1, 2, 1, 3, 4, 4), torch.bfloat16, Rotary())
    assert rotary(q, k, cos.float(), sin.float(), Rotary(), TRITON)[0].dtype == torch.float32


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_reference_has_the_gradients_of_finite_differences(form: Rotary) -> None:
    q, k, cos, sin = made((1, 2, 1, 2, 5, 4), torch.float64, form)
    given = q.requires_grad_(), k.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, cos, sin, form, Kernels("reference")), given)


def test_what_is_not_finite_stays_with_its_pair() -> None:
    q, k, cos, sin = made((1, 2, 2, 3, 6, 6), torch.float32, Rotary())
    q[0, 0, 1, 2], k[0, 1, 0, 5] = float("nan"), float("inf")
    given = q, k, cos, sin
    for found, expected in zip(rotary(*given, Rotary(), TRITON), eager(*given, Rotary()), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_same_bits_twice() -> None:
    q, k, cos, sin = made((2, 3, 2, 5, 8, 8), torch.bfloat16, Rotary())
    pairs = zip(*(rotary(q, k, cos, sin, Rotary(), TRITON) for _ in range(2)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_operator_is_registered_as_torch_wants_it() -> None:
    q, k, cos, sin = made((1, 2, 1, 2, 8, 6), torch.float32, Rotary())
    given = q.requires_grad_(), k.requires_grad_(), cos, sin
    check_operator(torch.ops.trine.rotary.default, (*given, False, False))
    check_operator(torch.ops.trine.rotary.default, (*given, True, True))
