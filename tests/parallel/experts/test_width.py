"""The proof of experts that tensor ranks cut along their width: the results of the parts add up, or it is refused."""

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.experts.forms import RoutedExperts
from engine.parallel.experts.proof import prove_routed
from engine.parallel.experts.width import WidthCut, prove_width
from engine.parallel.shard_table import Range
from engine.parallel.tensor.plan.ranges import cut_parts
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from tests.parallel.experts.stacks import Biased


class Bounded(Biased):
    """Experts whose results are bounded after the last product."""

    def ended(self, hidden: Tensor, expert: int) -> Tensor:
        """Returns the results of an expert."""
        return super().ended(hidden, expert).tanh()


CUTS = {"up": ParameterCut(1, cut_parts(12, 2, 2)), "down": ParameterCut(2, cut_parts(6, 2))}
SHARED = {"up": ParameterCut(1, (Range(0, 12, (0, 1)),)), "down": CUTS["down"]}


def proven(kind: type[nn.Module], cuts: dict[str, ParameterCut]) -> WidthCut | str:
    torch.manual_seed(0)
    module = kind()
    found = prove_routed("experts", module)
    assert isinstance(found, RoutedExperts)
    return prove_width(module, found, cuts, (), 2)


def test_the_last_bias_is_added_by_one_rank_and_a_factor_is_used_by_all() -> None:
    assert proven(Biased, CUTS) == WidthCut(("bias", "factor"), ("bias",))


@pytest.mark.parametrize(
    ("kind", "cuts", "reason"),
    [
        (Bounded, CUTS, "the results of their parts do not add up to those of whole experts"),
        (Biased, {**CUTS, "up": ParameterCut(1, cut_parts(12, 2))}, "the results of their parts do not add up"),
        (Biased, {"up": CUTS["up"]}, "the results of their parts do not add up to those of whole experts"),
        (Biased, {"up": ParameterCut(0, cut_parts(4, 2))}, "the tensor plan cuts them along another dim"),
        (Biased, SHARED, "their width does not divide among 2 tensor ranks"),
        (Biased, {}, "the tensor plan does not cut them"),
    ],
)
def test_parts_that_are_no_summands_are_refused_with_the_reason(
    kind: type[nn.Module], cuts: dict[str, ParameterCut], reason: str
) -> None:
    said = proven(kind, cuts)
    assert isinstance(said, str) and said.startswith(reason)
