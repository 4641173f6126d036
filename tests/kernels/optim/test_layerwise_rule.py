"""LAMB and LARS, against the formulas of the papers in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import load_config
from engine.zero.optim.rules.layerwise import FlatLamb, FlatLARS

SHAPES = {"matrix": (5, 3), "vector": (7,), "scalar": ()}
STEPS = 4


def weights_and_gradients() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}

    weights = draw() | {"zeros": torch.zeros(4, dtype=torch.float64)}
    grads = [draw() | {"zeros": torch.ones(4, dtype=torch.float64) * step} for step in range(STEPS)]
    return weights, grads


def params_of(kind: str, **changes: Any) -> dict[str, Any]:
    config = load_config({"train_batch_size": 1, "optimizer": {"type": kind, "params": changes}}).optimizer
    assert config is not None
    return dict(config.params)


def by_ours(kind: str, **changes: Any) -> dict[str, Tensor]:
    weights, gradients = weights_and_gradients()
    parameters = {name: torch.nn.Parameter(value) for name, value in weights.items()}
    make = {"Lamb": FlatLamb, "LARS": FlatLARS}[kind]
    optimizer = make(list(parameters.values()), **params_of(kind, **changes))
    for grads in gradients:
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def lamb(**changes: Any) -> dict[str, Tensor]:
    weights, gradients = weights_and_gradients()
    p = params_of("Lamb", **changes)
    (beta1, beta2), eps = p["betas"], p["eps"]
    for name, w in weights.items():
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step, grads in enumerate(gradients, start=1):
            m = beta1 * m + (1 - beta1) * grads[name]
            v = beta2 * v + (1 - beta2) * grads[name] ** 2
            corrected = (m / (1 - beta1**step), v / (1 - beta2**step)) if p["bias_correction"] else (m, v)
            root = (corrected[1] + eps).sqrt() if p["eps_inside_sqrt"] else corrected[1].sqrt() + eps
            update = corrected[0] / root + p["weight_decay"] * w
            ratio = 1.0
            if w.norm() > 0 and update.norm() > 0:
                ratio = min(max(float(w.norm() / update.norm()), p["min_coeff"]), p["max_coeff"])
            w -= p["lr"] * ratio * update
    return weights


def lars(**changes: Any) -> dict[str, Tensor]:
    weights, gradients = weights_and_gradients()
    p = params_of("LARS", **changes)
    for name, w in weights.items():
        v = torch.zeros_like(w)
        for grads in gradients:
            g, local = grads[name], 1.0
            if w.norm() > 0 and g.norm() > 0:
                local = p["trust_coefficient"] * w.norm() / (g.norm() + p["weight_decay"] * w.norm() + p["eps"])
            v = p["momentum"] * v + p["lr"] * local * (g + p["weight_decay"] * w)
            w -= v
    return weights


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Lamb", {}),
        ("Lamb", {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3}),
        ("Lamb", {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3, "eps_inside_sqrt": True, "bias_correction": False}),
        ("Lamb", {"lr": 0.1, "max_coeff": 0.3, "min_coeff": 0.2}),
        ("LARS", {}),
        ("LARS", {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.1, "momentum": 0.5}),
        ("LARS", {"momentum": 0.0}),
    ],
)
def test_updates_are_those_of_the_papers(kind: str, changes: dict[str, Any]) -> None:
    expected = {"Lamb": lamb, "LARS": lars}[kind](**changes)
    for name, value in by_ours(kind, **changes).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
