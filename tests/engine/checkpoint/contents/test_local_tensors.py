"""What data ranks hold of a parameter and of its moments: together every element once."""

import torch
from torch import Tensor, nn

from engine.checkpoint.format.pieces import Piece, covers_once
from tests.engine.checkpoint.fake_ranks import fake_run


class Layers(nn.Module):
    """Weights that end in the middle of shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_moments_of_data_ranks_tile_every_parameter() -> None:
    settings = {"train_batch_size": 3, "zero_optimization": {"stage": 1}, "parallel": {"data": 3}}
    run = fake_run(Layers, settings, torch.ones(1, 20))
    held: dict[str, list[Piece]] = {}
    for rank in run.ranks:
        for found in rank.local_tensors.state(rank.made):
            assert found.own.elements == found.values.numel()
            held.setdefault(found.tensor, []).append(found.own)
    assert {name.partition("/")[0] for name in held} == {"exp_avg", "exp_avg_sq"} and len(held) == 8
    shapes = {name: parameter.shape for name, parameter in Layers().named_parameters()}
    for name, pieces in held.items():
        assert covers_once(tuple(shapes[name.partition("/")[2]]), pieces), name
    assert max(map(len, held.values())) > 1, "several ranks share a parameter"
