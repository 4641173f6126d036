"""Alike blocks: equal but for the position that they keep; patterns that repeat; names that alike blocks share."""

import torch
from torch import nn

from engine.dry_run.repeating_blocks import AlikeRun, KindNames, longest_run


class Layer(nn.Module):
    def __init__(self, position: int, width: int = 4, window: int | None = None) -> None:
        super().__init__()
        self.layer_idx, self.window = position, window
        self.down = nn.Linear(width, width, device="meta")


class Stack(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4, device="meta")
        self.layers = nn.ModuleList(layers)


def test_the_position_makes_no_kind() -> None:
    model = Stack(*(Layer(at) for at in range(5)))
    assert longest_run(model) == AlikeRun(blocks="layers", start=0, period=1, periods=5)


def test_a_setting_that_is_a_position_once_is_a_setting() -> None:
    model = Stack(*(Layer(at, window=2) for at in range(5)))
    assert longest_run(model) == AlikeRun(blocks="layers", start=0, period=1, periods=5)


def test_blocks_in_front_are_not_of_the_run() -> None:
    model = Stack(Layer(0, 8), *(Layer(at) for at in range(1, 7)))
    assert longest_run(model) == AlikeRun(blocks="layers", start=1, period=1, periods=6)


def test_kinds_by_turns_are_one_period() -> None:
    model = Stack(Layer(0, 8), *(Layer(at, window=7 if at % 2 else None) for at in range(1, 8)))
    assert longest_run(model) == AlikeRun(blocks="layers", start=2, period=2, periods=3)


def test_the_period_of_most_blocks_is_found_though_the_last_blocks_are_alike() -> None:
    model = Stack(*(Layer(at, window=None if at % 3 == 2 else 7) for at in range(11)))
    assert longest_run(model) == AlikeRun(blocks="layers", start=2, period=3, periods=3)


def test_no_run_where_the_last_blocks_differ() -> None:
    assert longest_run(Stack(*(Layer(at, 4 + at) for at in range(5)))) is None
    frozen = Stack(*(Layer(at) for at in range(4)))
    frozen.layers[3].requires_grad_(False)
    assert longest_run(frozen) is None


def test_names_of_alike_blocks_are_equal() -> None:
    names = KindNames(Stack(Layer(0, 8), Layer(1), Layer(2)))
    assert names.of("layers.1.down.weight") == names.of("layers.2.down.weight") == "layers.#1.down.weight"
    assert names.of("layers.0.down.weight") == "layers.#0.down.weight"
    assert names.of("embed.weight") == "embed.weight"
    assert KindNames(nn.Sequential(nn.ReLU(), nn.ReLU())).of("1") == "#0"
    assert torch.nn  # names need no tensors
