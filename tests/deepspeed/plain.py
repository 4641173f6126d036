"""``deepspeed.initialize`` over plain torch in one process: what a script prints with it is the reference."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import engine.deepspeed as deepspeed
from engine.deepspeed.asked import Throughput
from engine.deepspeed.runtime.lr_schedules import WarmupLR


class Plain:
    """The members that the scripts call."""

    local_rank, device = 0, torch.device("cpu")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, config: Any) -> None:
        self.module, self.optimizer, self.scheduler, self.config = model, optimizer, scheduler, config
        self.tput_timer = Throughput()
        self._saved: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self) -> None:
        if clipping := self.config.get("gradient_clipping", 0):
            nn.utils.clip_grad_norm_(self.module.parameters(), clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def train_batch_size(self) -> int:
        return int(self.config.get("train_batch_size", self.config.get("train_micro_batch_size_per_gpu")))

    train_micro_batch_size_per_gpu = train_batch_size

    def bfloat16_enabled(self) -> bool:
        return False

    fp16_enabled = bfloat16_enabled

    def offload_states(self, **_: Any) -> None:
        pass

    def reload_states(self) -> None:
        pass

    def save_checkpoint(self, save_dir: str, client_state: Any) -> None:
        self._saved = client_state, deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load_checkpoint(self, load_dir: str) -> tuple[str, Any]:
        client_state, (weights, moments) = self._saved
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
        return load_dir, client_state


def initialize(
    args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None, config: Any = None,
    training_data: Any = None, lr_scheduler: Any = None, dist_init_required: Any = None,
) -> tuple[Plain, Any, Any, Any]:  # fmt: skip
    """Everything whole, and the batch in one piece."""
    if optimizer is None:
        params = dict(config["optimizer"]["params"])
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)  # as DeepSpeed's own Adam has it
        optimizer = torch.optim.AdamW(model_parameters, **params)
    if "scheduler" in config:
        lr_scheduler = WarmupLR(optimizer, **config["scheduler"]["params"])
    loader = None
    if training_data is not None:
        sampler = DistributedSampler[Any](training_data, num_replicas=1, rank=0)
        loader = DataLoader(training_data, batch_size=config["train_batch_size"], sampler=sampler)
    return Plain(model, optimizer, lr_scheduler, config), optimizer, loader, lr_scheduler


def install() -> None:
    """Use it in this process."""
    deepspeed.initialize = initialize  # type: ignore[assignment]
