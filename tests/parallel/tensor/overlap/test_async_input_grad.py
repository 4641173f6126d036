"""The sum of an input gradient travels while weight gradients are computed; ranks are threads, events are noted."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.comm.comm import Pending
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.side_effects import AttributeState
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.overlap.async_input_grad import Entrance, share_input
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.thread_ranks import SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import Overlap, TensorAxis
from tests.parallel.tensor.layers.test_linear_ranks import HIDDEN, ROWS, WIDTH, Crossed, make

PLAN = {"up": "column", "gate": "column", "down": "row"}
EVERYWHERE = Overlap(frozenset({"cpu"}), 0)
Events = list[str]


def note(axis: TensorAxis, model: nn.Module) -> Events:
    """What happens in a backward, in its order: sums that start and end, gradients of parameters that are done."""
    events: Events = []

    def noted(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(tensor: Tensor, label: str, *more: Any) -> Any:
            result = start(tensor, label, *more)
            events.append(f"start {label}")
            pending = result if isinstance(result, Pending) else result[-1]

            def wait() -> None:
                pending.wait()
                events.append(f"end {label}")

            return Pending(wait) if result is pending else (result[0], Pending(wait))

        return started

    names = ("start_all_reduce", "start_all_gather", "start_reduce_scatter")
    for name in names:
        setattr(axis, name, noted(getattr(axis, name)))
    for name, parameter in model.named_parameters():
        untyped: Any = parameter
        untyped.register_post_accumulate_grad_hook(
            lambda parameter, name=name: None if parameter.grad is None else events.append(name)
        )
    return events


def cut(model: nn.Module, axis: TensorAxis, overlap: Overlap = EVERYWHERE, plan: Any = None) -> nn.Module:
    axis.overlap = overlap
    apply_plan(model, find_tensor_plan(model, plan or PLAN, axis.size), axis, ForwardPatches())
    return model


def given() -> Tensor:
    x = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
    return x.requires_grad_()


def test_all_weight_gradients_of_a_region_come_while_the_sum_travels() -> None:
    def body(axis: TensorAxis) -> Events:
        model = cut(make("plain"), axis)
        y = model(given())
        events = note(axis, model)
        y.sum().backward()
        return events

    meanwhile = ["gate.weight", "gate.bias", "up.weight", "up.bias"]
    expected = ["down.weight", "start column inputs", *meanwhile, "end column inputs"]
    assert run_tensor_ranks(2, body) == [expected] * 2


def test_without_overlap_and_for_small_tensors_the_sum_is_waited_for() -> None:
    def body(axis: TensorAxis, overlap: Overlap) -> Events:
        model = cut(make("plain"), axis, overlap)
        y = model(given())
        events = note(axis, model)
        y.sum().backward()
        return events

    size = 2 * ROWS * WIDTH * 4
    for overlap in (Overlap(), Overlap(frozenset({"cpu"}), size + 1)):
        for events in run_tensor_ranks(2, partial(body, overlap=overlap)):
            assert events[-2:] == ["start column inputs", "end column inputs"]
    for events in run_tensor_ranks(2, partial(body, overlap=Overlap(frozenset({"cpu"}), size))):
        assert events[-1] == "end column inputs" and events[-2] != "start column inputs"


def test_what_is_cut_is_gathered_and_its_gradient_travels_back_alike() -> None:
    torch.manual_seed(0)
    made = nn.ModuleList(Layer(WIDTH, HIDDEN) for _ in range(2))
    whole = torch.randn(2, 4, WIDTH)

    def body(axis: TensorAxis) -> tuple[Events, bool]:
        axis.overlap = EVERYWHERE
        layers = deepcopy(made)
        part = whole.chunk(axis.size, 1)[axis.index].clone().requires_grad_()
        shared = share_input(part, Entrance(axis, True, dim=-2), list(layers))
        y = torch.cat([shared.multiply(layer) for layer in layers])
        events = note(axis, layers)
        y.sum().backward()  # type: ignore[no-untyped-call]
        reference = whole.clone().requires_grad_()
        torch.cat([layer(reference) for layer in layers]).sum().backward()  # type: ignore[no-untyped-call]
        assert part.grad is not None and reference.grad is not None
        mine = axis.size * reference.grad.chunk(axis.size, 1)[axis.index]
        return events, torch.allclose(part.grad, mine)

    meanwhile = ["1.weight", "1.bias", "0.weight", "0.bias"]
    for events, same in run_tensor_ranks(2, body):
        assert events[:6] == ["start column inputs", *meanwhile, "end column inputs"] and same


class Layer(nn.Linear):
    """A layer whose product has the name that cut layers have for it."""

    def multiply(self, x: Tensor) -> Tensor:
        return super().forward(x)


def gathered_again(axis: TensorAxis, made: nn.ModuleList, whole: Tensor, regather: bool) -> tuple[list[Any], Events]:
    """A backward of a recomputed part and a plain one: all gradients, and what happened in the second."""
    layers = deepcopy(made)
    part = whole.chunk(axis.size, -2)[axis.index].clone().requires_grad_()
    for again in (True, False):

        def run() -> Tensor:
            shared = share_input(part, Entrance(axis, True, dim=-2, regather=regather), list(layers))
            return torch.cat([shared.multiply(layer).sin() for layer in layers])

        y = checkpoint(run, use_reentrant=False) if again else run()
        events = note(axis, layers)
        y.sum().backward()
    return [part.grad, *(parameter.grad for parameter in layers.parameters())], events.copy()


def test_what_is_gathered_once_more_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    made = nn.ModuleList(Layer(WIDTH, HIDDEN) for _ in range(2))
    whole = torch.randn(3, 4, WIDTH)

    def body(axis: TensorAxis, cast: bool) -> Events:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            (again, events), (kept, _) = (gathered_again(axis, made, whole, regather) for regather in (True, False))
        assert all(torch.equal(one, other) for one, other in zip(again, kept, strict=True))
        return events

    meanwhile = ["1.weight", "1.bias", "0.weight", "0.bias"]
    gather, scatter = "start column inputs", "start column inputs"
    for events in run_tensor_ranks(2, partial(body, cast=False)):
        seen = [event for event in events if event.startswith("start") or event in meanwhile]
        assert seen[-6:] == [gather, scatter, *meanwhile]
    run_tensor_ranks(2, partial(body, cast=True))


def test_gathering_once_more_keeps_a_part_and_is_told_of() -> None:
    layer, whole = Layer(WIDTH, HIDDEN), torch.randn(4, WIDTH)

    def body(axis: TensorAxis) -> None:
        kept: list[int] = []
        told: list[Any] = []
        axis.listener = lambda what, _: told.append(what)
        own = deepcopy(layer)
        part = whole.chunk(axis.size, -2)[axis.index].clone().requires_grad_()

        def pack(saved: Tensor) -> Tensor:
            kept.append(saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            share_input(part, Entrance(axis, True, dim=-2, regather=True), [own]).multiply(own)
        assert kept == [part.numel(), own.weight.numel()]
        with axis.dry_run():
            shared = share_input(part, Entrance(axis, True, dim=-2, regather=True), [own])
        assert shared.multiply(own).shape == (4, HIDDEN)
        calls = [("all_gather", False), ("all_gather", True), ("reduce_scatter", True)]
        assert sorted((entry.op, entry.backward) for entry in told) == calls
        assert {entry.bytes for entry in told} == {4 * WIDTH * 4}

    run_tensor_ranks(2, body)


# ---------------------------------------------------------------------------------- the same bits, whatever is done


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


def recomputed_under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return model(model(x))  # type: ignore[no-any-return]


def without_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.detach()) + x  # type: ignore[no-any-return]


def with_a_residual(model: nn.Module, x: Tensor) -> Tensor:
    return x + model(x) * x  # type: ignore[no-any-return]


def one_column_unused(model: Any, x: Tensor) -> Tensor:
    model.up(x)
    return model.down(model.gate(x))  # type: ignore[no-any-return]


RUNS = (
    plainly, recomputed, under_autocast, recomputed_under_autocast, twice, without_input_gradient, with_a_residual,
    one_column_unused,
)  # fmt: skip


def frozen(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def all_frozen(model: Any) -> None:
    model.requires_grad_(False)


def tied(model: Any) -> None:
    model.up.weight = model.gate.weight


def hooked(model: Any) -> None:
    model.up.weight.register_hook(lambda grad: grad * 2)


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.up, "weight", nn.Tanh())


def nothing(model: Any) -> None:
    pass


def kind(name: str, change: Callable[[Any], None] = nothing) -> nn.Module:
    model = Crossed() if name == "crossed" else make(name)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    change(model)
    return model


def found(axis: TensorAxis, model: nn.Module, run: Callable[..., Tensor]) -> list[Tensor | None]:
    """Of two microbatches: the output, the gradients of the input and of the parameters."""
    x = given()
    for _ in range(2):
        y = run(model, x)
        y.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert isinstance(axis, SimulatedAxis)
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def compare(model_of: Callable[[], nn.Module], run: Callable[..., Tensor], after: Any = nothing) -> None:
    def body(axis: TensorAxis, overlap: Overlap) -> tuple[list[Tensor | None], list[Any]]:
        model = cut(model_of(), axis, overlap)
        after(model)
        results = found(axis, model, run)
        assert isinstance(axis, SimulatedAxis)
        return results, axis.called

    ours = run_tensor_ranks(2, partial(body, overlap=EVERYWHERE))
    for (late, sent), (plain, sent_plain) in zip(
        ours, run_tensor_ranks(2, partial(body, overlap=Overlap())), strict=True
    ):
        assert sent == sent_plain
        assert [entry is None for entry in late] == [entry is None for entry in plain]
        for left, right in zip(late, plain, strict=True):
            assert left is None or right is None or torch.equal(left, right)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["plain", "conv1d", "scaled"])
def test_the_bits_are_those_of_a_sum_that_is_waited_for(name: str, run: Callable[..., Tensor]) -> None:
    compare(partial(kind, name), run)


@pytest.mark.parametrize("change", [frozen, all_frozen, tied, hooked])
@pytest.mark.parametrize("run", [plainly, recomputed])
def test_so_they_are_whatever_the_weights_are(change: Callable[[Any], None], run: Callable[..., Tensor]) -> None:
    compare(partial(kind, "plain", change), run)


def test_so_they_are_with_two_inputs_and_with_computed_weights() -> None:
    compare(partial(kind, "crossed"), plainly)
    compare(partial(kind, "plain"), plainly, parametrized)


def test_a_split_backward_keeps_its_own_plans() -> None:
    def body(axis: TensorAxis) -> Events:
        model = cut(make("plain"), axis)
        waiting, leftover = SplitBackward(model, ForwardPatches()), DeferredWeightGrads()
        y = model(given())
        events = note(axis, model)
        with waiting.leaving(leftover):
            y.sum().backward()
        leftover.compute(lambda name, gradient: events.append(f"late {name}"))
        return events

    left = [f"late {name}" for name in ("down.weight", "up.weight", "up.bias", "gate.weight", "gate.bias")]
    assert run_tensor_ranks(2, body) == [["start column inputs", "end column inputs", *left]] * 2


# ---------------------------------------------------------------------------------- backwards of the user's own


def test_a_backward_that_asks_for_less_gets_just_that() -> None:
    def body(axis: TensorAxis) -> None:
        model: Any = cut(make("plain"), axis)
        x = given()
        y = model(x).sum()
        y.backward(retain_graph=True)
        expected = [x.grad, model.gate.weight.grad, model.up.weight.grad]
        (dx,) = torch.autograd.grad(y, x, retain_graph=True)
        (dw,) = torch.autograd.grad(y, model.gate.weight, retain_graph=True)
        both = torch.autograd.grad(y, [x, model.up.weight], retain_graph=True)
        again = torch.autograd.grad(y, [x, model.gate.weight, model.up.weight])
        for one, other in zip(
            [dx, dw, *both, *again], [*expected[:2], expected[0], expected[2], *expected], strict=True
        ):
            assert torch.equal(one, other)

    run_tensor_ranks(2, body)


def test_second_derivatives_are_refused_also_after_a_first_one() -> None:
    def body(axis: TensorAxis) -> None:
        model: Any = cut(make("plain"), axis)
        x = given()
        y = model(x).square().sum()
        torch.autograd.grad(y, x, retain_graph=True)
        with pytest.raises(EngineError, match="first derivatives only"):
            torch.autograd.grad(y, x, create_graph=True)

    run_tensor_ranks(2, body)


def test_nothing_that_waited_is_kept() -> None:
    def body(axis: TensorAxis) -> bool:
        model: Any = cut(make("plain"), axis)
        waited: list[StorageWeakRef] = []
        for layer in (model.up, model.gate):
            layer.register_full_backward_hook(
                lambda module, into, out: waited.append(StorageWeakRef(out[0].untyped_storage()))  # type: ignore[no-untyped-call]
            )
        y = model(given())  # keeps the graph
        y.sum().backward()
        return len(waited) == 2 and all(storage.expired() for storage in waited)  # type: ignore[no-untyped-call]

    assert run_tensor_ranks(2, body) == [True, True]


def test_a_dry_run_tells_of_the_sum_once() -> None:
    def body(axis: TensorAxis) -> list[tuple[str, str, bool]]:
        model = cut(make("plain"), axis)
        told: list[Any] = []
        axis.listener = lambda what, _: told.append(what)
        with axis.dry_run():
            assert model(given()).shape == (2, ROWS, WIDTH)
        return [(entry.op, entry.label, entry.backward) for entry in told]

    expected = [("all_reduce", "column inputs", True), ("all_reduce", "row outputs", False)]
    assert run_tensor_ranks(2, body) == [expected] * 2


def test_a_region_that_has_run_looks_like_one_that_has_not() -> None:
    def body(axis: TensorAxis) -> None:
        model = cut(make("plain"), axis)
        switches = AttributeState(model)
        before = switches.read()
        for _ in range(2):
            model(given()).sum().backward()
            assert switches.read() is before, "or the model would be looked at anew"

    run_tensor_ranks(2, body)


def test_a_copied_region_forgets_its_own_inputs() -> None:
    def body(axis: TensorAxis) -> list[int]:
        model: Any = cut(make("plain"), axis)
        model(given())
        copied = deepcopy(model)
        kept = model.up(given())
        copied.up(given()).sum().backward()
        del kept
        return [len(layer.tensor_region._copies) for layer in (model.up, copied.up)]

    assert run_tensor_ranks(2, body) == [[1, 0]] * 2
