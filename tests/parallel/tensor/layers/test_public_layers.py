"""The sharded layers that model writers use by themselves."""

import copy

import pytest
import torch
from torch import Tensor, nn

from engine.errors import EngineError, PlanError
from engine.parallel.tensor.layers.linear import ColumnLinear, GatheredColumnLinear, RowLinear, keep_rows, local_rows
from engine.parallel.tensor.layers.parallel_region import Region
from engine.parallel.tensor.layers.vocab_parallel import (
    EmbeddingLayer,
    VocabularyEmbedding,
    VocabularyHead,
    prepare_embedding,
)
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.parallel.tensor.plan.ranges import cut_parts, cut_unevenly
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

ROWS, WIDTH, WORDS = 5, 8, 11


class Written(nn.Module):
    """A perceptron with an embedding, a gathered projection and a head, all cut."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__()
        region = Region(axis)
        self.words = VocabularyEmbedding(WORDS, WIDTH, axis=axis)
        self.up = ColumnLinear(WIDTH, 4 * WIDTH, axis=axis, region=region)
        self.down = RowLinear(4 * WIDTH, WIDTH, axis=axis, region=region)
        self.mix = GatheredColumnLinear(WIDTH, WIDTH, axis=axis)
        self.head = VocabularyHead(WIDTH, WORDS, bias=True, axis=axis)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(input=ids)  # as torch names it
        x = x + self.down(input=torch.tanh(self.up(input=x)))
        logits: Tensor = gather_logits(self.head(input=torch.tanh(self.mix(input=x))))
        return logits


class Whole(nn.Module):
    """The same in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        logits: Tensor = self.head(torch.tanh(self.mix(x)))
        return logits


def part(name: str, full: Tensor, axis: TensorAxis) -> Tensor:
    """What a rank holds of a parameter."""
    layer = name.split(".")[0]
    if layer == "down":
        return full if name == "down.bias" else local_rows(full, 1, cut_parts(full.shape[1], axis.size), axis.index)
    cut = cut_unevenly if layer in ("words", "head") else cut_parts
    return local_rows(full, 0, cut(full.shape[0], axis.size), axis.index)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_model_written_with_them_is_the_whole_model(tp: int) -> None:
    torch.manual_seed(3)
    reference = Whole().double()
    ids = torch.randint(0, WORDS, (2, ROWS))
    noise = torch.randn(2, ROWS, WORDS, dtype=torch.float64)

    def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(ids)
        torch.autograd.backward((out * noise).sum())
        return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, grads = run(copy.deepcopy(reference))

    def body(axis: TensorAxis) -> tuple[Tensor, dict[str, Tensor], TensorAxis]:
        model = Written(axis).double()
        for name, parameter in model.named_parameters():
            parameter.data = part(name, reference.get_parameter(name).data, axis)
        return *run(model), axis

    for out, found, axis in run_tensor_ranks(tp, body):
        torch.testing.assert_close(out, expected)
        assert found.keys() == grads.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, part(name, grads[name], axis))


def test_sizes_that_the_axis_does_not_divide_are_refused() -> None:
    def body(axis: TensorAxis) -> str:
        with pytest.raises(PlanError) as caught:
            GatheredColumnLinear(4, 6, axis=axis)
        return str(caught.value)

    said = "out_features = 6 does not divide among 4 tensor ranks; choose a multiple of 4."
    assert run_tensor_ranks(4, body) == [said] * 4


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_an_id_outside_the_vocabulary_is_refused_as_in_one_process(wrong: int) -> None:
    ids = torch.tensor([0, WORDS - 1, wrong])

    def body(axis: TensorAxis) -> str:
        with pytest.raises(EngineError) as caught:
            VocabularyEmbedding(WORDS, WIDTH, axis=axis)(ids)
        return str(caught.value)

    (said, other) = run_tensor_ranks(2, body)
    assert said == other
    assert said == (
        f"a token id is outside the vocabulary of {WORDS} rows: the ids of this batch reach from {min(0, wrong)} to "
        f"{max(WORDS - 1, wrong)}; pass ids from 0 to {WORDS - 1}."
    )


class Bounded(nn.Embedding):
    """A table of a user, which keeps what it returns for its backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(super().forward(tokens))


def test_a_table_with_its_own_forward_has_the_gradient_of_the_whole() -> None:
    torch.manual_seed(3)
    whole, ids = Bounded(WORDS, WIDTH), torch.arange(WORDS).view(1, -1)
    noise = torch.randn(1, WORDS, WIDTH)
    torch.autograd.backward((whole(ids) * noise).sum())

    def body(axis: TensorAxis) -> None:
        ranges = cut_unevenly(WORDS, axis.size)
        table: nn.Module = copy.deepcopy(whole)
        table.zero_grad()
        keep_rows(table, 0, ranges, axis.index)
        table.__class__ = type("EmbeddingLayerBounded", (EmbeddingLayer, Bounded), {})
        prepare_embedding(table, Vocabulary(axis, tuple(piece.stop - piece.start for piece in ranges)))
        found = table(tokens=ids)
        torch.autograd.backward((found * noise).sum())
        assert whole.weight.grad is not None
        torch.testing.assert_close(found, whole(ids))
        wanted = local_rows(whole.weight.grad, 0, ranges, axis.index)
        torch.testing.assert_close(table.get_parameter("weight").grad, wanted)
        with pytest.raises(TypeError, match="takes one tensor was called with 2 arguments; pass one"):
            table(ids, ids)

    run_tensor_ranks(2, body)
