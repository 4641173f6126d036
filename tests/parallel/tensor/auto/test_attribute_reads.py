"""Which numbers the code of a block reads while it runs. One process."""

import torch
from torch import Tensor, nn

from engine.parallel.tensor.auto.search import AttributeReads
from engine.parallel.tensor.auto.strategies import Number


class Config:
    """With another name for one of its numbers."""

    attribute_map = {"heads": "n_head"}  # noqa: RUF012

    def __init__(self) -> None:
        self.n_head, self.layers = 4, 2


class Asking(nn.Module):
    """Reads some of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width, self.unused = 4, 8, 6
        self.config = Config()

    @property
    def through(self) -> int:
        return self.width

    def forward(self, x: Tensor) -> Tensor:
        return x * self.heads * self.through * self.config.n_head


NUMBERS = [Number("", name) for name in ("heads", "width", "unused", "config.n_head", "config.heads", "config.layers")]


def test_what_is_read_is_noted_and_nothing_else() -> None:
    block, reads = Asking(), AttributeReads(NUMBERS)
    config = block.config
    assert reads.seen == set(NUMBERS)  # until it is watched
    reads.watch(block)
    assert reads.seen == set()
    assert block(torch.ones(1)) == 4 * 8 * 4 and isinstance(block, Asking)
    assert {number.attribute for number in reads.seen} == {"heads", "width", "config.n_head", "config.heads"}
    assert type(config) is Config


def test_a_config_whose_class_cannot_change_counts_as_read() -> None:
    class Slotted:
        __slots__ = ("n_head",)

        def __init__(self) -> None:
            self.n_head = 4

    block, reads = Asking(), AttributeReads([Number("", "config.n_head"), Number("", "unused")])
    block.config = Slotted()  # type: ignore[assignment]
    reads.watch(block)
    assert reads.seen == {Number("", "config.n_head")}
