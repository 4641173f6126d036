"""Cut layers against whole ones: public classes, users' subclasses, hooks, both weight layouts."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import PlanError
from engine.parallel.tensor.layers.linear import ColumnLinear, RowLinear
from engine.parallel.tensor.layers.parallel_region import Region
from engine.parallel.tensor.layers.vocab_parallel import VocabularyEmbedding, VocabularyHead
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.sharded import Sharded, assert_close, full_gradients, open_comm, shard

RunRanks = Callable[..., list[Any]]

WIDTH, HIDDEN, ROWS = 16, 24, 5
PLAN = {"up": "column", "gate": "column", "down": "row"}


class Scaled(nn.Linear):
    """A user's layer with a forward of its own, which lets its gradient through unchanged as well."""

    factor = 3.0

    def forward(self, x: Tensor) -> Tensor:
        """Reads weight and bias itself."""
        return functional.linear(x, self.weight * self.factor, self.bias)


class Residual(nn.Linear):
    """Adds its input: the gradient that reaches the input is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        """x + Ax, of the columns of this rank."""
        y = super().forward(x)
        return y + x[..., : y.shape[-1]]


class Conv1D(nn.Module):
    """The [in, out] layout, as Hugging Face has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        """xA + b."""
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.size()[:-1], self.nf)


class Gated(nn.Module):
    """gate and up share an input; its layers are of the given kinds."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        """[.., WIDTH] to the same."""
        y: Tensor = self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return y


def make(kind: str) -> Gated:
    """A whole model."""
    torch.manual_seed(2)
    if kind == "conv1d":
        return Gated(Conv1D(HIDDEN, WIDTH), Conv1D(HIDDEN, WIDTH), Conv1D(WIDTH, HIDDEN))
    if kind == "scaled":
        return Gated(Scaled(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False), Scaled(HIDDEN, WIDTH))
    return Gated(nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False))


def check(whole: nn.Module, sharded: Sharded, calls: int = 1) -> None:
    """Outputs, input gradients and parameter gradients are equal; the gradient of x is summed ``calls`` times."""
    torch.manual_seed(4)
    x = torch.randn(2, ROWS, WIDTH)
    given, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = whole(given), sharded.model(ours)
    assert_close(found, expected, "output")
    torch.autograd.backward(expected.square().sum())
    torch.autograd.backward(found.square().sum())
    assert given.grad is not None and ours.grad is not None
    assert_close(ours.grad, given.grad, "input gradient")
    gradients = full_gradients(sharded)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert_close(gradients[name], parameter.grad, name)
    counted = {row.label: row.calls for row in sharded.comm.tally.rows()}
    assert counted == {"row outputs": 1, "column inputs": calls}, counted


def kinds_of_layers() -> None:
    """Body of a rank."""
    for kind in ("plain", "conv1d", "scaled"):
        model = make(kind)
        sharded = shard(deepcopy(model), PLAN)
        check(model, sharded)
        with torch.no_grad():
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
            assert_close(sharded.model(x), model(x), "without gradients")
        sharded.comm.close()


def test_layers_of_every_kind(run_ranks: RunRanks) -> None:
    run_ranks(kinds_of_layers, 2)
    run_ranks(kinds_of_layers, 4)


def shared_gradients() -> None:
    """Body of a rank: summing in place would spoil the gradient that Residual's input shares with its output."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"up": Residual(WIDTH, WIDTH), "down": nn.Linear(WIDTH, WIDTH)})
    sharded = shard(model, {"up": "column", "down": "row"})
    up, down = model["up"], model["down"]
    kept: list[Tensor] = []
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    middle = up(x)
    middle.register_hook(lambda grad: kept.append(grad))
    before: list[Tensor] = []
    middle.register_hook(lambda grad: before.append(grad.clone()))
    torch.autograd.backward(down(middle).square().sum())
    assert torch.equal(kept[0], before[0])
    sharded.comm.close()


def test_a_gradient_that_others_read_is_left_alone(run_ranks: RunRanks) -> None:
    run_ranks(shared_gradients, 2)


def what_stays() -> None:
    """Body of a rank: objects, attributes, hooks, isinstance, names."""
    model = make("scaled")
    up: Any = model.gate
    down: Any = model.down
    seen: list[tuple[int, ...]] = []
    weight = up.weight
    up.note = "mine"
    up.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    names = list(model.state_dict())
    sharded = shard(model, PLAN)
    assert [id(model.gate), id(model.down), id(up.weight)] == [id(up), id(down), id(weight)] and up.note == "mine"
    assert all(isinstance(model.gate, kind) for kind in (Scaled, nn.Linear)) and isinstance(model.up, ColumnLinear)
    assert list(model.state_dict()) == names
    model(torch.zeros(ROWS, WIDTH))
    assert seen == [(ROWS, HIDDEN // 2)]
    assert (up.out_features, down.in_features, down.out_features) == (HIDDEN // 2, HIDDEN // 2, WIDTH)
    assert weight.untyped_storage().nbytes() == weight.numel() * 4 == WIDTH * HIDDEN // 2 * 4
    sharded.comm.close()


def test_a_users_module_stays_itself(run_ranks: RunRanks) -> None:
    run_ranks(what_stays, 2)


def on_meta() -> list[tuple[int, ...]]:
    """Body of a rank: shapes after cutting a model without memory."""
    with torch.device("meta"):
        model = make("plain")
    sharded = shard(model, PLAN)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert all(parameter.is_meta for parameter in model.parameters())
    with sharded.axis.dry_run():
        assert model(torch.empty(3, WIDTH, device="meta")).shape == (3, WIDTH)
    sharded.comm.close()
    return shapes


def test_models_on_the_meta_device(run_ranks: RunRanks) -> None:
    half = HIDDEN // 2
    shapes = [(half, WIDTH), (half,), (half, WIDTH), (half,), (WIDTH, half)]
    assert run_ranks(on_meta, 2) == [shapes] * 2


class Written(nn.Module):
    """A model whose writer uses the public classes."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__()
        region = Region(axis)
        self.tokens = VocabularyEmbedding(13, WIDTH, axis=axis, padding_idx=12)
        self.up = ColumnLinear(WIDTH, HIDDEN, axis=axis, region=region)
        self.down = RowLinear(HIDDEN, WIDTH, axis=axis, region=region)
        self.head = VocabularyHead(WIDTH, 13, bias=True, axis=axis)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.down(torch.tanh(self.up(self.tokens(ids)))))
        return logits


def by_hand() -> float:
    """Body of a rank: the loss of layers written into a model, whose weights are parts of one matrix each."""
    comm = open_comm()
    torch.manual_seed(6)
    model = Written(TensorAxis(comm))
    ids = torch.arange(12).view(2, 6)
    loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    torch.autograd.backward(loss)
    try:
        ColumnLinear(4, 9, axis=TensorAxis(comm))
    except PlanError as error:
        assert str(error) == "out_features = 9 does not divide among 2 tensor ranks; choose a multiple of 2."
    comm.close()
    return float(loss.detach())


def test_public_layers_draw_parts_of_the_whole_matrices(run_ranks: RunRanks) -> None:
    torch.manual_seed(6)
    tokens, up = nn.Embedding(13, WIDTH, padding_idx=12), nn.Linear(WIDTH, HIDDEN)
    down, head = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 13)
    ids = torch.arange(12).view(2, 6)
    logits = head(down(torch.tanh(up(tokens(ids)))))
    loss = float(functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).detach())
    assert all(abs(found - loss) < 1e-6 for found in run_ranks(by_hand, 2))


class Crossed(nn.Module):
    """Cross-attention without the attention: columns on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The second input is another tensor."""
        y: Tensor = self.down(self.up(x) * self.gate(x * 2))
        return y


def two_inputs() -> None:
    """Body of a rank."""
    torch.manual_seed(2)
    model = Crossed()
    sharded = shard(deepcopy(model), PLAN)
    check(model, sharded, calls=2)
    sharded.comm.close()


def test_columns_on_two_inputs_sum_each(run_ranks: RunRanks) -> None:
    run_ranks(two_inputs, 2)
