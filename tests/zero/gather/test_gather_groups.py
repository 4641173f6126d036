"""Which modules gather together, for models of all shapes."""

from torch import nn

from engine.zero.gather.gather_groups import find_gather_groups
from tests import models
from tests.zero.awkward import Chain, HeadFirst


def test_blocks_have_groups_and_the_rest_lies_before_and_after() -> None:
    groups = find_gather_groups(models.decoder(layers=4))
    assert len(groups.modules) == 4 + 2
    assert groups.modules[1:5] == tuple((f"blocks.{number}",) for number in range(4))
    assert set(groups.of_parameter.values()) == {(number,) for number in range(6)}


def test_tied_parameters_have_both_groups() -> None:
    groups = find_gather_groups(models.decoder(tied=True, layers=2))
    assert groups.of_parameter["tokens.weight"] == (0, 3)


def test_what_runs_between_two_chains_goes_with_the_block_before() -> None:
    groups = find_gather_groups(models.t5())
    blocks = [name for group in groups.modules for name in group if ".block." in name]
    assert len(groups.modules) == len(blocks) + 2
    encoder_norm = next(group for group in groups.modules if "encoder.final_layer_norm" in group)
    assert encoder_norm[0].startswith("encoder.block.")


def test_groups_follow_the_order_of_calls_where_it_is_known() -> None:
    model = Chain()
    calls = ["embed", *(f"blocks.{number}.up" for number in range(4)), "norm", "head"]
    inorder = find_gather_groups(model).modules
    assert inorder == (("embed",), *((f"blocks.{number}",) for number in range(4)), ("norm", "head"))
    backwards = HeadFirst()
    assert find_gather_groups(backwards).modules[0] == ("head", "norm")
    assert find_gather_groups(backwards, calls).modules == inorder


class Loose(nn.Module):
    """No chain; a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.Linear(1, 1).weight.detach())
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)


def test_without_blocks_every_module_has_a_group() -> None:
    groups = find_gather_groups(Loose())
    assert groups.modules == (("one",), ("two",))
    assert groups.of_parameter["scale"] == ()


def test_a_model_that_is_one_layer() -> None:
    groups = find_gather_groups(nn.Linear(2, 2))
    assert groups.modules == (("",),) and groups.of_parameter["weight"] == (0,)
