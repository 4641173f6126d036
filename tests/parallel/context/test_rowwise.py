"""Modules that treat positions one by one are found by trial, and run on the positions of a rank as plain tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.context.choose import Method
from engine.parallel.context.rows.call_forms import CallRecorder
from engine.parallel.context.rows.rowwise import LocalCall, find_rowwise, run_rowwise
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.tp_axis import DryAxis
from engine.verify import verify
from tests.parallel.context.test_context_training import config_of
from tests.selection import wide

ROWS, LENGTH, WIDTH = 2, 9, 8


class Square(torch.autograd.Function):
    """Function that reads memory, which global tensors do not have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.data_ptr()
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.mul(2 * x)


class MixedBackward(Square):
    """Function with a backward that mixes positions."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.mean(1, keepdim=True).expand_as(grad).mul(2 * x)


class Layer(nn.Module):
    """Two products with ``between`` in the middle."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], **own: Any) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), between
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.between(self, self.up(x)))
        return out


def _sorted_by_expert(layer: nn.Module, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    expert = (rows[:, 0] > 0).long()
    order = expert.argsort(stable=True)
    parts = torch.split(rows[order], expert.bincount(minlength=2).tolist())
    out = torch.cat([part * (1 + number) for number, part in enumerate(parts)])
    return out[order.argsort()].view_as(x)


def _applied(function: type[torch.autograd.Function], x: Tensor) -> Tensor:
    out: Tensor = function.apply(x)  # type: ignore[no-untyped-call]
    return out


def _normed(layer: Any, x: Tensor) -> Tensor:
    out: Tensor = layer.norm(x.flatten(0, 1)).view(x.shape)
    return out


def _counted(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return x


def _kept(layer: Any, x: Tensor) -> Tensor:
    layer.seen.append(x)
    return x


BY_ROWS: dict[str, Callable[[], nn.Module]] = {
    "autograd function": lambda: Layer(lambda layer, x: _applied(Square, x)),
    "rows sorted by expert": lambda: Layer(_sorted_by_expert),
    "layer norm": lambda: Layer(lambda layer, x: functional.layer_norm(x, (WIDTH,))),
    "dropout": lambda: Layer(lambda layer, x: functional.dropout(x, 0.5, layer.training)),
    "flattened": lambda: Layer(lambda layer, x: functional.gelu(x.flatten(0, 1)).view(x.shape)),
}
TRAPS: dict[str, Callable[[], nn.Module]] = {
    "statistics over positions": lambda: Layer(lambda layer, x: x - x.mean(1, keepdim=True)),
    "batch norm": lambda: Layer(lambda layer, x: _normed(layer, x), norm=nn.BatchNorm1d(WIDTH)),
    "cumulative sum": lambda: Layer(lambda layer, x: x.cumsum(1)),
    "bias of the position": lambda: Layer(lambda layer, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]),
    "shift by one": lambda: Layer(lambda layer, x: x + x.roll(1, 1)),
    "backward that mixes": lambda: Layer(lambda layer, x: _applied(MixedBackward, x)),
    "counter": lambda: Layer(_counted, calls=0),
    "kept activations": lambda: Layer(_kept, seen=[]),
    "in place": lambda: Layer(lambda layer, x: x, up=nn.ReLU(inplace=True)),
    "noise": lambda: Layer(lambda layer, x: x + torch.randn_like(x)),
    "dropout of channels": lambda: Layer(lambda layer, x: functional.dropout1d(x.mT, 0.5, layer.training).mT),
    "number of positions": lambda: Layer(lambda layer, x: x / x.shape[1]),
}


def _found(layer: nn.Module) -> list[str]:
    model = nn.ModuleDict({"layer": layer})
    recorder, x = CallRecorder(model), torch.randn(ROWS, LENGTH, WIDTH)
    with recorder.watching(), torch.no_grad():
        layer(x.clone())
    return [each.name for each in find_rowwise(model, [x], recorder.calls)]


@pytest.mark.parametrize("kind", BY_ROWS)
def test_a_module_of_positions_is_found(kind: str) -> None:
    assert _found(BY_ROWS[kind]()) == ["layer"]


@pytest.mark.parametrize("kind", TRAPS)
def test_a_module_that_mixes_positions_or_has_state_is_refused(kind: str) -> None:
    assert "layer" not in _found(TRAPS[kind]())


class Switched(nn.Module):
    """Layer that mixes positions if a private attribute or a buffer is true."""

    on: Tensor

    def __init__(self, private: bool, on: bool) -> None:
        super().__init__()
        self.up, self._mixes = nn.Linear(WIDTH, WIDTH), private
        self.register_buffer("on", torch.tensor(on))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return x.cumsum(1) if self._mixes or self.on else x


@pytest.mark.parametrize("mixes", [(True, False), (False, True)])
def test_layers_of_one_class_that_differ_in_private_attributes_or_buffers_are_tried_apart(
    mixes: tuple[bool, bool],
) -> None:
    layers = nn.ModuleList([Switched(False, False), Switched(*mixes)])
    recorder, x = CallRecorder(layers), torch.randn(ROWS, LENGTH, WIDTH)
    with recorder.watching(), torch.no_grad():
        _ = [layer(x) for layer in layers]
    assert [each.name for each in find_rowwise(layers, [x], recorder.calls)] == ["0", "1.up"]


def test_a_module_is_refused_while_a_hook_listens_inside() -> None:
    layer = Layer(lambda layer, x: functional.layer_norm(x, (WIDTH,)))
    handle = layer.up.register_forward_hook(lambda module, given, out: None)
    assert _found(layer) == ["layer.up", "layer.down"]
    handle.remove()
    assert _found(layer) == ["layer"]


def test_a_trial_changes_neither_the_model_nor_the_random_state() -> None:
    layer = BY_ROWS["dropout"]()
    before, state = {name: each.clone() for name, each in layer.state_dict().items()}, torch.get_rng_state()
    x = torch.zeros(ROWS, LENGTH, WIDTH)
    model, recorder = nn.ModuleDict({"layer": layer}), CallRecorder(nn.ModuleDict({"layer": layer}))
    with recorder.watching():
        layer.eval()(x)
    layer.train()
    find_rowwise(model, [x], recorder.calls)
    assert torch.equal(torch.get_rng_state(), state) and layer.training
    assert all(torch.equal(each, before[name]) for name, each in layer.state_dict().items())


class Reader(nn.Module):
    """Language model of one kind of layer, between attention."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(31, WIDTH), make(), make()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 31)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        x = x + self.first(x)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        logits = self.head(x + self.last(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def reader(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return Reader(make)


def batches(length: int = 11) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 31, (4, length), generator=draw) for _ in range(3)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def test_code_that_needs_plain_tensors_trains_on_context_ranks() -> None:
    config = config_of({"data": 1, "context": 2}, train_micro_batch_size_per_gpu=2)
    for make in (BY_ROWS["autograd function"], BY_ROWS["rows sorted by expert"]):
        result = verify(partial(reader, make), config, batches(), threads=2)
        assert result is not None and result.holds(), str(result)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[set[type]]:
    """Types of the tensors with which modules of positions are called."""
    found, own = list[set[type]](), LocalCall.run

    def run(call: LocalCall, forward: Callable[..., Any], training: bool) -> Any:
        found.append({type(leaf) for leaf in call.leaves if isinstance(leaf, Tensor)})
        return own(call, forward, training)

    monkeypatch.setattr(LocalCall, "run", run)
    return found


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (kind, more) if (kind, more) == ("autograd function", {}) else wide(kind, more)
        for kind in ("autograd function", "layer norm", "flattened")
        for more in ({}, {"sequence_parallel": True}, {"pipeline": 2, "split": ["last"]})
    ],
    ids=str,
)
def test_modules_of_positions_run_on_local_tensors_with_tensor_ranks(
    kind: str, more: dict[str, Any], entered: list[set[type]]
) -> None:
    """With sequence parallelism, the positions of a context rank are global tensors over the tensor ranks."""
    parallel = {"data": 1, "context": 2, "tensor": 2, **more}
    config = config_of(parallel, train_micro_batch_size_per_gpu=2)
    threads = 4 * parallel.get("pipeline", 1)
    result = verify(partial(reader, BY_ROWS[kind]), config, batches(12), threads=threads)
    assert result is not None and result.holds(), str(result)
    assert entered and all(kinds == {GlobalTensor if "sequence_parallel" in more else Tensor} for kinds in entered)


def test_a_tensor_that_tensor_ranks_shard_alone_stays_a_global_one(entered: list[set[type]]) -> None:
    """Its norm sums the gradient of the weight over the tensor ranks."""
    model, x = nn.ModuleDict({"layer": nn.LayerNorm(WIDTH)}), torch.randn(ROWS, LENGTH, WIDTH)
    recorder, patches = CallRecorder(model), ForwardPatches()
    with recorder.watching():
        model["layer"](x)
    run_rowwise(model, find_rowwise(model, [x], recorder.calls), patches)
    made = []
    for name in ("tp", "cp"):
        context = global_context(DryAxis(3, name=name))
        sets = (None, Index.even_blocks(LENGTH, 3), None)
        made.append(model["layer"](GlobalTensor(x[:, : LENGTH // 3], tuple(x.shape), sets, context)))
        assert len(entered) == (name == "cp")
    assert torch.equal(made[0].local, made[1].local) and made[0].sets == made[1].sets


@pytest.mark.parametrize("method", ["auto", *(wide(method) for method in get_args(Method))])
def test_code_between_stages_attends_and_reshapes_on_context_ranks(method: str) -> None:
    """A shard has other strides than those of another rank, which the trace of the stages has."""
    parallel = {"data": 1, "context": {"size": 2, "method": method}, "pipeline": 2, "split": ["last"]}
    config = config_of(parallel, train_micro_batch_size_per_gpu=2)
    result = verify(partial(reader, BY_ROWS["layer norm"]), config, batches(12), threads=4)
    assert result is not None and result.holds(), str(result)


def _compiled(in_place: bool) -> nn.Module:
    layer = Layer(lambda layer, x: functional.gelu(x))
    if not in_place:
        return torch.compile(layer, backend="aot_eager")  # type: ignore[return-value]
    layer.compile(backend="aot_eager")
    return layer


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_runs_unchanged(in_place: bool) -> None:
    config = config_of({"data": 1, "context": 2}, train_micro_batch_size_per_gpu=2)
    result = verify(lambda: reader(lambda: _compiled(in_place)), config, batches(), threads=2)
    assert result is not None and result.holds(), str(result)
