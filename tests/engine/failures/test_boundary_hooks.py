"""Hooks of the user's at the boundary of a stage: they change training as in one process, or are refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import engine
from tests import models
from tests.engine.every_grid import every_grid
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import ROWS, data, in_one_process, on_ranks, settings

RunRanks = Callable[..., list[Any]]
Hook = Callable[[nn.Module], object]
SECOND = "blocks.1"
"""The second one of two blocks; the first one is the last of its stage."""


def on_output(model: nn.Module, factor: float) -> object:
    """A forward hook that hooks the tensor which the block at the boundary returns."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]

    return model.get_submodule("blocks.0").register_forward_hook(hook)


def on_input(model: nn.Module, factor: float) -> object:
    """A forward pre-hook of the first block of the next stage that hooks its input."""

    def hook(module: nn.Module, args: Any) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: grad * factor)

    return model.get_submodule(SECOND).register_forward_pre_hook(hook)


def replaced(model: nn.Module, factor: float) -> object:
    return model.get_submodule("blocks.0").register_forward_hook(lambda module, args, out: out * factor + args[0])


def replaced_input(model: nn.Module, factor: float) -> object:
    return model.get_submodule(SECOND).register_forward_pre_hook(lambda module, args: (args[0] * factor, *args[1:]))


def scaled_backward(module: nn.Module, factor: float) -> object:
    def hook(module: nn.Module, given: Any, made: Any) -> tuple[Tensor, ...]:
        return (given[0] * factor,)

    return module.register_full_backward_hook(hook)


def backward_inside(model: nn.Module, factor: float) -> object:
    return scaled_backward(next(iter(model.get_submodule("blocks.0").children())), factor)


def backward_after(model: nn.Module, factor: float) -> object:
    return scaled_backward(model.get_submodule(SECOND), factor)


def before_backward_after(model: nn.Module, factor: float) -> object:
    def hook(module: nn.Module, made: Any) -> tuple[Tensor, ...]:
        return (made[0] * factor,)

    return model.get_submodule(SECOND).register_full_backward_pre_hook(hook)


HOOKS: dict[str, Callable[[nn.Module, float], object]] = {
    "tensor hook on the output": on_output,
    "tensor hook on the input": on_input,
    "forward hook that replaces the output": replaced,
    "forward pre-hook that replaces the input": replaced_input,
    "full backward hook inside a block": backward_inside,
    "full backward hook on the last block": backward_after,
    "full backward pre-hook on the last block": before_backward_after,
}


def trained(grid: dict[str, int], stage: Any) -> dict[str, str]:
    """Body of a rank: what differs from one process, by kind of hook."""
    found = {}
    for name, register in HOOKS.items():

        def change(step: int, model: nn.Module, groups: Any, register: Any = register) -> None:
            if step == 0:
                register(model, 1.5)

        norms, weights = on_ranks(settings(grid, stage), change, ())
        expected = in_one_process(change, (), grid["data"])
        norm = max(abs(a - b) / b for a, b in zip(norms, expected[0], strict=True))
        far = max([float((weights[key] - value).abs().max()) for key, value in expected[1].items()] if weights else [0])
        found[name] = "" if norm <= 1e-5 and far <= 1e-5 else f"norms {norm:.1e}, weights {far:.1e}"
    return found


WIDEST = pytest.param({"data": 1, "tensor": 2, "pipeline": 2}, 0, id="tp2-pp2", marks=pytest.mark.long)


@pytest.mark.parametrize(("grid", "stage"), [*every_grid("pp2"), WIDEST])
def test_hooks_change_training_as_in_one_process(grid: dict[str, int], stage: Any, run_ranks: RunRanks) -> None:
    for found in run_ranks(trained, math.prod(grid.values()), grid, stage, seconds=300.0):
        assert found == dict.fromkeys(HOOKS, "")


def refused() -> tuple[list[str], str]:
    """Body of a rank: what is said of hooks at the boundary, and of one around it; then training goes on.

    Then what is said of a hook on a tensor that crosses, and that the forward has not registered before.
    """
    texts, later = list[str](), list[Any]()
    config = settings({"data": 1, "pipeline": 2}, 0)
    model = models.decoder()

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        for function in later:
            out.register_hook(function)  # type: ignore[no-untyped-call]

    model.get_submodule("blocks.0").register_forward_hook(hook)
    with engine.initialize(model, config, loss_of, example_batch=data(1)[0][: ROWS // 2]) as eng:
        for name, register in (
            ("blocks.0", "register_full_backward_hook"),
            ("blocks.0", "register_full_backward_pre_hook"),
            ("blocks", "register_full_backward_hook"),
        ):
            handle = getattr(model.get_submodule(name), register)(lambda *_: None)
            with pytest.raises(engine.EngineError) as caught:
                eng.train_batch(data(1)[0])
            texts.append(str(caught.value))
            handle.remove()
        texts.append(f"{eng.train_batch(data(1)[0]).loss:.6f}")
        later.append(print)
        with pytest.raises(engine.EngineError) as caught:
            eng.train_batch(data(1)[0])
        return texts, str(caught.value)


def test_backward_hooks_that_a_pipeline_cannot_call_are_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    (first, here), (second, there) = run_ranks(refused, 2)
    assert first == second
    assert here.startswith("the output of unit 'blocks.0' goes to another stage and has a hook (register_hook)"), here
    assert "has a hook (register_hook), but had none when the engine recorded" in there
    for text, why in zip(first[:3], ("sends its output to another", "sends its output", "is on several"), strict=True):
        assert text.startswith("module 'blocks") and why in text and "hook a module inside of a stage" in text
