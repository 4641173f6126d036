"""What of a LightningModule is on the grid, and what of Lightning's Trainer the engine takes, without Lightning."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.hosting.loop_settings import LoopSettings, move_others, of_lightning, replace_child, trained_child


def trainer(**changes: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "precision": "32-true", "gradient_clip_val": None, "gradient_clip_algorithm": None,
        "accumulate_grad_batches": 2,
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


class Script(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def test_what_the_trainer_says_is_taken() -> None:
    plain = LoopSettings(owner="Trainer", accumulation=("accumulate_grad_batches", 2))
    assert of_lightning(trainer()) == plain
    found = of_lightning(trainer(gradient_clip_val=0.5, precision="bf16-mixed"))
    assert found.clipping == ("gradient_clip_val", 0.5) and found.precision == "bf16"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"precision": "16-mixed"},
            'precision is "16-mixed" in Trainer, whose plugin would cast the weights or scale the loss; set "32-true" '
            'or "bf16-mixed", and bf16 or fp16 in engine_config.',
        ),
        (
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": SimpleNamespace(value="value")},
            'gradient_clip_algorithm is "value" in Trainer, but the engine clips by the norm; remove it.',
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        of_lightning(trainer(**changes))
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("children", "name", "found"),
    [
        ({"net": nn.Linear(2, 2), "loss": nn.MSELoss()}, None, "net"),
        ({"net": nn.Linear(2, 2), "teacher": frozen()}, None, "net"),
        ({"net": frozen()}, None, "net"),
        ({"net": Script(inner=nn.Linear(2, 2))}, "net.inner", "net.inner"),
    ],
)
def test_the_child_with_parameters_is_on_the_grid(children: dict[str, nn.Module], name: Any, found: str) -> None:
    assert trained_child(Script(**children), name) == found


@pytest.mark.parametrize(
    ("children", "name", "sentence"),
    [
        (
            {"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)}, None,
            "Script has parameters in encoder, decoder, but the engine places one module; put them into one, as "
            "self.model, or name it in Strategy(module=...).",
        ),
        (
            {"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)}, "encoder",
            "Script has the trainable parameter 'decoder.weight' outside its module 'encoder', but the engine trains "
            "only parameters inside 'encoder'; move it into that module, or freeze it with requires_grad_(False).",
        ),
        (
            {"net": nn.Linear(2, 2)}, "model",
            "Strategy was given module 'model', which Script does not have; name one of its modules.",
        ),
    ],
)  # fmt: skip
def test_parameters_beside_it_are_refused(children: dict[str, nn.Module], name: Any, sentence: str) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        trained_child(Script(**children), name)
    assert str(caught.value) == sentence


def test_a_child_is_replaced_and_the_others_move() -> None:
    module = Script(net=Script(inner=nn.Linear(2, 2)), teacher=frozen())
    replace_child(module, "net.inner", nn.Identity())
    assert isinstance(module.get_submodule("net.inner"), nn.Identity)
    module.net = nn.Linear(2, 2)
    move_others(module, "net", torch.device("meta"))
    assert {name: p.is_meta for name, p in module.named_parameters() if name.endswith("weight")} == {
        "net.weight": False, "teacher.weight": True
    }  # fmt: skip
