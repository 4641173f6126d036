"""LAMB and LARS, whose steps depend on norms of whole parameters: one process's numbers, bytes as planned, any grid."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.config import load_config
from engine.errors import ConfigError
from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models
from tests.engine.parity.optimizer_grids import OPTIMIZER_GRIDS
from tests.engine.parity.test_parity_preconditioned import Turns
from tests.engine.parity.test_parity_state_forms import (
    INPUTS,
    RunRanks,
    beside_plan,
    goes_on_bit_for_bit,
    layers,
    settings,
    train,
)
from tests.parallel.comm.small_decoder import on_threads
from tests.selection import wide

LAMB: dict[str, Any] = {"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-5, "weight_decay": 0.1}}
LARS: dict[str, Any] = {"type": "LARS", "params": {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.02}}
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
LIST = [{"match": "blocks.0.*", **LAMB}, {"match": "blocks.1.*", **LARS}, ADAMW]
EACH: dict[str, Any] = {"lamb": LAMB, "lars": LARS, "list": LIST}


@pytest.mark.parametrize(
    ("optimizer", "ranks", "zero"),
    [
        ("lamb", 2, {"stage": 1, "reduce_bucket_size": 100}),
        ("lars", 2, {"stage": 3}),
        ("list", 2, {"stage": 2}),
        *(
            wide(name, ranks, zero)
            for name in EACH
            for ranks in (2, 4)
            for zero in ({"stage": 0}, {"stage": 1}, {"stage": 2, "reduce": "microbatch"}, {"stage": 3})
        ),
    ],
)
def test_data_ranks_train_as_one_process(optimizer: str, ranks: int, zero: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(16, INPUTS, generator=generator, dtype=torch.float64) for _ in range(4)]
    found = verify(layers, settings(EACH[optimizer], {"data": ranks}, zero), batches, threads=ranks)
    assert found is not None and found.holds(1e-6, 1e-6, 1e-6), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.parametrize(("parallel", "zero", "ranks"), [*OPTIMIZER_GRIDS, ({"pipeline": 2}, {"stage": 0}, 2)])
@pytest.mark.parametrize("kind", [wide("llama"), "decoder tied"])
@pytest.mark.parametrize("optimizer", ["lamb", wide("lars")])
def test_any_grid_trains_as_one_process(
    optimizer: str, kind: str, parallel: dict[str, Any], zero: dict[str, Any], ranks: int
) -> None:
    def build() -> nn.Module:
        return models.llama() if kind == "llama" else models.decoder(tied=True)

    name = kind.split()[0]
    found = verify(
        build, settings(EACH[optimizer], parallel, zero), models.batches_for(name, 16, 3),
        loss_sum if name == "decoder" else None, threads=ranks,
    )  # fmt: skip
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_each_parameter_counts_its_own_updates(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [{"x": torch.randn(8, 8, generator=generator), "turn": torch.full((8,), t)} for t in (0, 0, 1, 2, 0, 1)]
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1,
        "parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": EACH[optimizer],
    }  # fmt: skip
    found = verify(Turns, config, batches, lambda output, batch: output, threads=2)
    assert found is not None and found.holds(), str(found)


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero"),
    [
        (4, {"data": 2, "tensor": 2}, {"stage": 1}),
        wide(2, {"data": 2}, {"stage": 0}),
        wide(4, {"data": 2, "pipeline": 2}, {"stage": 3}),
        wide(4, {"data": 4}, {"stage": 1, "shard_size": 2}),
    ],
)
@pytest.mark.parametrize("bf16", [wide(False), True])
def test_bytes_sent_and_kept_are_those_of_the_plan(
    ranks: int, parallel: dict[str, Any], zero: dict[str, Any], bf16: bool
) -> None:
    changes = {"parallel": parallel, "zero_optimization": zero, "optimizer": LIST, "bf16": {"enabled": bf16}}
    assert on_threads(ranks, changes, beside_plan) == [[]] * ranks


@pytest.mark.parametrize("optimizer", ["lamb", wide("lars")])
def test_a_process_goes_on_from_its_checkpoint(tmp_path: Path, optimizer: str) -> None:
    goes_on_bit_for_bit(tmp_path, EACH[optimizer])


@pytest.mark.long
def test_a_run_goes_on_from_a_checkpoint_on_another_grid(run_ranks: RunRanks, tmp_path: Path) -> None:
    losses, weights, _ = run_ranks(train, 2, str(tmp_path), 2, {"data": 2}, {"stage": 3}, LIST, False)[0]
    for parallel, zero in (({"tensor": 2}, {"stage": 0}), ({"pipeline": 2}, {"stage": 0})):
        again, found, _ = run_ranks(train, 2, str(tmp_path), 2, parallel, zero, LIST, True)[0]
        assert again == pytest.approx(losses, rel=1e-6)
        assert max(float((found[name] - value).abs().max()) for name, value in weights.items()) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
         'zero_optimization.offload_optimizer.device: "cpu" with Lamb, which reduces norms on the device; '
         "leave offload_optimizer out, or give AdamW."),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
         "bf16.bf16_master_weights_and_grads: true with Lamb, which rounds to nearest, but bf16 weights without fp32 "
         "copies lose small updates unless updates are rounded stochastically; leave bf16_master_weights_and_grads "
         "out, or use the optimizer AdamW."),
        ({"optimizer": {"type": "lamb", "params": {"min_coeff": 2, "max_coeff": 1}}},
         "optimizer.params.min_coeff: 2 is above max_coeff, 1; lower it, or raise max_coeff."),
    ],
)  # fmt: skip
def test_what_they_lack_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 4, "optimizer": LAMB} | changes)
    assert str(caught.value) == said
