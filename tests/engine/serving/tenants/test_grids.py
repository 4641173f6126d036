"""Adapters on tensor ranks: collectives of a datum as without them, one sum a step, and the values of one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.traffic import Tally, Traffic
from engine.parallel.comm.world import World
from engine.serving.commands import AdamParameters, Adapter, ForwardBackward, LossCall, OptimStep
from engine.serving.tenants.pool import TenantPool
from engine.serving.training import TenantTrainer
from tests import models
from tests.engine.serving.test_training import make_data
from tests.parallel.tensor.plans import written_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]
RANK, STEPS, DATA = 4, 2, 4
ADAM = AdamParameters(lr=1e-2, eps=1e-5, weight_decay=0.1, max_norm=0.05)
GRIDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2, sequence": (2, {"tensor": 2, "sequence_parallel": True}),
    "tp2 x pp2": (4, {"tensor": 2, "pipeline": 2}),
    "dp2 x tp2": (4, {"data": 2, "tensor": 2}),
}
FEW: Mapping[str, Any] = {"quantize_frozen": {"dtype": "nf4"}, "checkpoint": {"frozen": False}}
HALVES = 2 * (3 * 32 + 32 + 2 * 32 + 32) + 32
"""Elements of whole halves of rank 1: A of q, k, v, gate, up and the head, and B of o and down."""


def one_head() -> nn.Module:
    """A Llama with one key head, which both tensor ranks store."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=1,
        )
    )  # fmt: skip


def fused() -> nn.Module:
    """A GPT-2, with one matrix for query, key and value."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=models.VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


MODELS: Mapping[str, Callable[[], nn.Module]] = {"llama": models.llama, "fused": fused, "one key head": one_head}


@dataclass(frozen=True, slots=True)
class Trained:
    """Run of a tenant on one rank."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: Mapping[str, Tensor]
    datum: tuple[Traffic, ...]
    """Sent by forwards and backwards of one update, without the metrics, whose digits vary."""
    step: Tally


def config_of(parallel: Mapping[str, Any], model: str = "llama", **more: Any) -> dict[str, Any]:
    """Settings of a grid, with a written tensor plan, since the search would take longer than the test."""
    plan = {"tensor_plan": written_plan(MODELS[model]()), "prove_plan": False} if "tensor" in parallel else {}
    return {"train_micro_batch_size_per_gpu": 1, "parallel": {**parallel, **plan}, **more}


def train(eng: Engine, name: str, trainer: TenantTrainer | None = None) -> Trained:
    """Makes a few updates; the last one is counted."""
    trainer, losses, norms = trainer or TenantTrainer(eng, {}), [], []
    for step in range(STEPS):
        before = eng.sent
        made = trainer.forward_backward(ForwardBackward(name, make_data(DATA, step), LossCall("cross_entropy")))
        between = eng.sent
        norms.append(trainer.optim_step(OptimStep(name, ADAM)).values["grad_norm"])
        losses.append(made.metrics["loss:sum"])
    last = eng.sent
    weights = {key: value for key, value in eng.full_state_dict().items() if ".lora_" in key}
    datum = tuple(row for row in between.since(before).rows() if row.label != "served metrics")
    return Trained(tuple(losses), tuple(norms), weights, datum, last.since(between))


def adapter_on(config: Mapping[str, Any], model: str, world: World | None) -> Trained:
    """Body of a rank: trains an adapter on every layer."""
    pool = TenantPool(MODELS[model], load_config(dict(config), world.size if world else 1), world=world)
    try:
        return train(pool.create("tenant", Adapter(RANK, seed=3)), "tenant")
    finally:
        pool.close()


def plain_on(config: Mapping[str, Any], world: World) -> tuple[Traffic, ...]:
    """Body of a rank: traffic of a datum of a model with the same layers trained, without adapters."""
    model = models.llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" in name or "lm_head" in name)
    example = {"input_ids": torch.zeros(1, 32, dtype=torch.int64)}
    with engine.initialize(model, dict(config), example_batch=example, world=world) as eng:
        return train(eng, "plain").datum


def agrees(ranks: list[Trained], alone: Trained) -> None:
    """Compares a grid with one process, within the bounds that every grid has."""
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-6)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-5)
    assert min(alone.norms) > ADAM.max_norm and ranks[0].weights.keys() == alone.weights.keys()
    for name, value in alone.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def alone() -> Trained:
    """A tenant on one rank."""
    return adapter_on(config_of({}), "llama", None)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_datum_takes_the_collectives_that_it_takes_without_adapters(grid: str, alone: Trained) -> None:
    count, parallel = GRIDS[grid]
    config = config_of(parallel)
    ranks = run_thread_ranks(count, lambda world: adapter_on(config, "llama", world))
    plain = run_thread_ranks(count, lambda world: plain_on(config, world))
    agrees(ranks, alone)
    for rank, without in zip(ranks, plain, strict=True):
        assert rank.datum == without
        (summed,) = (row for row in rank.step.rows() if row.axis == "tp" and row.label != "plan check")
        assert (summed.label, summed.calls) == ("replicated gradients", 1)
        assert grid == "tp2 x pp2" or summed.bytes == 4 * RANK * HALVES


@pytest.mark.parametrize("model", ["fused", "one key head"])
def test_pairs_follow_fused_and_shared_columns(model: str) -> None:
    config = config_of({"tensor": 2}, model)
    ranks = run_thread_ranks(2, lambda world: adapter_on(config, model, world))
    agrees(ranks, adapter_on(config_of({}), model, None))
    for rank in ranks:
        calls = {row.label: row.calls for row in rank.datum if row.axis == "tp"}
        assert (calls["row outputs"], calls["column inputs"]) == (DATA * 4, DATA * 4)


@pytest.mark.parametrize("form", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_a_base_in_few_bits_gives_the_losses_of_one_process(form: str) -> None:
    more = {**FEW, "quantize_frozen": {"dtype": form}}
    expected = adapter_on(config_of({}, **more), "llama", None)
    for parallel in ({"tensor": 2}, {"pipeline": 2}):
        config = config_of(parallel, **more)
        agrees(run_thread_ranks(2, lambda world, config=config: adapter_on(config, "llama", world)), expected)  # type: ignore[misc]


OTHERS: Mapping[str, tuple[Mapping[str, int], int]] = {
    "tp2": ({"tensor": 2}, 0), "pp2": ({"pipeline": 2}, 0), "dp2 ZeRO 1": ({"data": 2}, 1),
}  # fmt: skip


def continued(folder: Path) -> dict[str, tuple[float, ...]]:
    """Body of a rank: losses after a saved state, where it was saved and where it is loaded."""
    found = {}
    for grid, (parallel, stage) in {"saved": OTHERS["tp2"], **OTHERS}.items():
        config = config_of(parallel, **FEW, zero_optimization={"stage": stage})
        pool = TenantPool(models.llama, load_config(config, 2))
        trainer = TenantTrainer(pool.create("tenant", Adapter(RANK, seed=3 if grid == "saved" else 4)), {})
        if grid == "saved":
            train(trainer.engine, "tenant", trainer)
            trainer.save(folder)
        else:
            trainer.load(folder, optimizer=True)
        found[grid] = train(trainer.engine, "tenant", trainer).losses
        pool.close()
    return found


@pytest.mark.long
def test_a_saved_tenant_goes_on_on_other_grids(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for losses in run_ranks(continued, 2, tmp_path):
        expected = losses.pop("saved")
        assert losses["tp2"] == expected
        for grid in OTHERS:
            assert losses[grid] == pytest.approx(expected, rel=1e-6), grid
