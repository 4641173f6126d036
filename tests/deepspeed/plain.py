"""``deepspeed.initialize`` over plain torch in one process, for scripts that DeepSpeed itself runs on GPUs alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import engine.deepspeed as deepspeed
from engine.config import load_raw


class Lamb(torch.optim.Optimizer):
    """LAMB by its formula, in plain torch (You et al. 2020)."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        given = {"betas": (0.9, 0.999), "eps": 1e-8, "max_coeff": 10.0, "min_coeff": 0.01, "bias_correction": True}
        super().__init__(params, given | {"weight_decay": 0.0, "lr": lr} | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * self._update(parameter, group)

    def _update(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        grad, state, (beta1, beta2) = weight.grad, self.state[weight], group["betas"]
        assert grad is not None
        step = state["step"] = state.get("step", 0) + 1
        mean: Tensor = beta1 * state.get("mean", torch.zeros(())) + (1 - beta1) * grad
        square: Tensor = beta2 * state.get("square", torch.zeros(())) + (1 - beta2) * grad**2
        state["mean"], state["square"] = mean, square
        if group["bias_correction"]:
            mean, square = mean / (1 - beta1**step), square / (1 - beta2**step)
        update: Tensor = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * weight
        if not weight.norm() or not update.norm():
            return update
        ratio: Tensor = (weight.norm() / update.norm()).clamp(group["min_coeff"], group["max_coeff"])
        return update * ratio


class Plain:
    """The members that the script calls."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> None:
        self.module, self.optimizer, self.config = model, optimizer, config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(trained, self.config["gradient_clipping"])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def optimizer_name(self) -> str:
        return str(self.config["optimizer"]["type"]).lower()

    def train_batch_size(self) -> int:
        return int(self.config["train_batch_size"])

    train_micro_batch_size_per_gpu = train_batch_size


def initialize(args: Any, model: nn.Module, model_parameters: Any) -> tuple[Plain, Any, None, None]:
    """Everything whole, and the batch in one piece."""
    config = load_raw(args.deepspeed_config)
    optimizer = Lamb(model_parameters, **config["optimizer"]["params"])
    return Plain(model, optimizer, config), optimizer, None, None


def install() -> None:
    """Use it in this process."""
    deepspeed.initialize = initialize  # type: ignore[assignment]
