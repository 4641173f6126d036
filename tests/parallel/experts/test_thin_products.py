"""Trials of experts of published widths: neither their matrices nor copies of these are made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.parallel.experts.forms import RoutedExperts
from engine.parallel.experts.proof import prove_routed
from engine.parallel.experts.thin_products import ThinProducts

WIDTH, INNER = 1024, 1280


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bytes of the largest memory that an operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.most = max([self.most, *sizes])
        return made


@pytest.mark.parametrize("implementation", [pytest.param("eager", marks=pytest.mark.long), "grouped_mm", "batched_mm"])
def test_a_trial_of_wide_experts_needs_no_memory_of_their_size(implementation: str) -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=8)
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = MixtralSparseMoeBlock(config)  # type: ignore[no-untyped-call]
    with _Made() as made:
        found = prove_routed("experts", block.experts)
        around = prove_routed("mlp", block)
    assert isinstance(found, RoutedExperts) and found.width == WIDTH and found.experts == 8
    assert not isinstance(around, RoutedExperts)  # its router's rows divide by the number of chosen experts
    assert made.most < 2 * WIDTH * INNER


@pytest.mark.parametrize("dim", [0, 1])
def test_products_with_expanded_matrices_equal_those_with_copies(dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    thin = torch.randn(3, *((1, 16) if dim == 0 else (16, 1)), generator=draw).expand(3, 16, 16)
    a, bias, offs = torch.randn(3, 8, 16, generator=draw), torch.randn(16, generator=draw), torch.tensor([2, 2, 8])
    with ThinProducts():  # type: ignore[no-untyped-call]
        found = a[0] @ thin[0], a @ thin, torch.addmm(bias, a[0], thin[1], beta=0.5), torch.baddbmm(bias, a, thin)
        left, chosen = thin @ a.mT, torch.bmm(a, thin[torch.tensor([2, 0, 0])])
        grouped = nn.functional.grouped_mm(a[0], thin, offs=offs.int())
    whole = thin.contiguous()
    wanted = a[0] @ whole[0], a @ whole, torch.addmm(bias, a[0], whole[1], beta=0.5), torch.baddbmm(bias, a, whole)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close((left, chosen), (whole @ a.mT, torch.bmm(a, whole[[2, 0, 0]])))
    torch.testing.assert_close(grouped, torch.cat([a[0, :2] @ whole[0], a[0, 2:] @ whole[2]]))
