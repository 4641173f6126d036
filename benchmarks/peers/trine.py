"""Training by Trine: ``engine.initialize`` and ``train_batch``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.workload import BETAS, WEIGHT_DECAY, Mode, Workload, make_model, mean_loss


class Trine:
    """Trine: ``engine.initialize`` and ``train_batch``."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        import engine  # here, so that its import counts as its start-up

        config, example = self.config(mode, workload), _make_example(mode, workload)
        self._engine = engine.initialize(make_model(workload), config, _loss_of_batch, example)

    def config(self, mode: Mode, workload: Workload) -> dict[str, Any]:
        """Returns the engine's configuration of ``mode``."""
        return make_config(mode, workload)

    def step(self, rows: Tensor) -> float:
        return self._engine.train_batch({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).loss

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights on rank 0, nothing on other ranks."""
        return self._engine.full_state_dict()


def make_config(mode: Mode, workload: Workload) -> dict[str, Any]:
    """Returns the engine's configuration of a Trine mode."""
    zero: dict[str, int | str] = {"stage": mode.stage}
    zero |= {name: value for name, value in (("reduce", mode.reduce), ("gather", mode.gather)) if value}
    if workload.bucket_elements is not None:
        zero["reduce_bucket_size"] = workload.bucket_elements
    parallel: dict[str, Any] = {"data": mode.data_ranks}
    parallel |= {mode.axis: {"size": mode.ranks, "method": mode.method} if mode.method else mode.ranks}
    if mode.axis == "pipeline":
        parallel |= {"schedule": mode.schedule, "virtual_stages": mode.virtual_stages}
    watchdog = {} if mode.watched else {"watchdog": {"enabled": False}}
    return {
        **watchdog,
        "train_batch_size": workload.sequences,
        "gradient_accumulation_steps": mode.accumulation,
        "parallel": parallel,
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": workload.learning_rate,
                "betas": list(BETAS),
                "eps": workload.epsilon,
                "weight_decay": WEIGHT_DECAY,
            },
        },
        "gradient_clipping": workload.clip,
    }


def _make_example(mode: Mode, workload: Workload) -> dict[str, Tensor]:
    """Shapes of one microbatch: what cuts along and across the layers are planned with."""
    rows = workload.sequences // (mode.data_ranks * mode.accumulation)
    tokens = torch.empty(rows, workload.decoder.context, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _loss_of_batch(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return mean_loss(logits, batch["labels"])
