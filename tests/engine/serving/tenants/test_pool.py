"""Pool of tenants: what is stored once, what is parked, what is refused, what is saved."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.config import load_config
from engine.errors import ConfigError, EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World, read_world
from engine.serving.commands import Adapter
from engine.serving.host.service import empty_model
from engine.serving.tenants.adapters import adapted, find_targets
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.training import TenantTrainer
from tests import models
from tests.engine.checkpoint.test_published_keys import mixtral
from tests.engine.serving.tenants.tenant_runs import GRIDS, differing, open_pool, placed, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]
ELEMENTS = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)) + 32 + models.VOCABULARY
"""Elements of a pair of rank 1 on every layer of the tiny Llama with two blocks, and on its head."""


@pytest.fixture(scope="module")
def pool() -> Iterator[TenantPool]:
    """A pool on one rank."""
    made = open_pool(None, {}, full=2)
    yield made
    made.close()


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach."""
    gc.collect()
    # the class, because isinstance asks an object, and one of torch.distributed then warns that it is deprecated
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    tensors = [one for one in found if one.device.type != "meta"]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def make_step(pool: TenantPool, name: str, trainer: TenantTrainer, step: int = 0) -> None:
    """Makes one update of a tenant."""
    pool.get(name)
    for call in train(trainer, name, step, pool):
        call()


def test_a_tenant_stores_its_pairs_their_gradients_and_moments_and_a_drop_frees_them(pool: TenantPool) -> None:
    pool.create("warm", Adapter(1))
    base, before = placed(pool.base), live_bytes()
    for rank in (2, 16):
        pool.create(f"r{rank}", Adapter(rank, seed=rank))
        pairs = 4 * rank * ELEMENTS
        made = live_bytes()
        assert pairs * 2 <= made - before < pairs * 2 + 4096, (made - before, pairs)  # buckets are padded
        make_step(pool, f"r{rank}", TenantTrainer(pool.get(f"r{rank}"), {}))
        assert live_bytes() - made < pairs * 2 + 4096
        pool.drop(f"r{rank}")
        assert abs(live_bytes() - before) < 512
    assert not differing(placed(pool.base), base)
    assert pool.base.predict({"input_ids": torch.zeros(1, 5, dtype=torch.int64)}).logits.isfinite().all()
    pool.drop("warm")


def test_one_full_tenant_has_its_state_on_the_device(pool: TenantPool) -> None:
    first, second = pool.create("first", None), pool.create("second", None)
    assert pool.statistics().resident == ("second",)
    assert all(not flat.params.untyped_storage().nbytes() for flat in first._runtime.buckets)
    trainer = TenantTrainer(pool.get("first"), {})
    for call in train(trainer, "first", 0, pool)[:2]:
        call()
    assert pool.get("second") is second and first._runtime.offloaded.bytes >= 2 * 4 * 19424  # weights and gradients
    pool.create("pairs", Adapter(2))
    assert pool.statistics().resident == ("second",) and pool.statistics().adapters == 1
    pool.get("first")
    train(trainer, "first", 0, pool)[2]()
    for name in ("first", "second", "pairs"):
        pool.drop(name)
    assert pool.statistics().full == 0


def test_what_a_pool_refuses(pool: TenantPool) -> None:
    eng = pool.create("a", Adapter(2))
    for call, said in (
        (lambda: pool.create("a", Adapter(2)), "tenant 'a' exists already; call drop"),
        (lambda: pool.get("b"), "the pool has no tenant with model_id 'b'; call create"),
        (lambda: pool.create("b", Adapter(0)), "the adapter has rank 0; give a rank from 1 to 512"),
        (
            lambda: pool.create("b", Adapter(1, 0, False, False, False)),
            "lora_config selects nothing, so the adapter trains no linear layer of Llama",
        ),
        (lambda: eng.offload_states(), "offload_states was called on an engine that borrows its frozen parameters"),
        (lambda: eng.full_parameters().__enter__(), "full_parameters was called on an engine that borrows"),
    ):
        with pytest.raises((ConfigError, EngineError), match=said):
            call()
    assert pool.statistics().adapters == 1
    pool.drop("a")
    config = load_config({"train_micro_batch_size_per_gpu": 1}, 1)
    with TenantPoolOf(TenantPool(models.llama, config, TenantLimits(adapters=0))) as small:
        for adapter, said in ((None, "limit serve.tenants.full is 0"), (Adapter(1), "0 tenants with adapters exist")):
            with pytest.raises(ConfigError, match=said):
                small.create("a", adapter)


class TenantPoolOf:
    """Pool that a `with` block closes."""

    def __init__(self, pool: TenantPool) -> None:
        self._pool = pool

    def __enter__(self) -> TenantPool:
        return self._pool

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def test_a_tenant_is_saved_without_its_base_and_goes_on_from_there(pool: TenantPool, tmp_path: Path) -> None:
    one = TenantTrainer(pool.create("one", Adapter(4, seed=9)), {})
    make_step(pool, "one", one)
    one.engine.save_checkpoint(tmp_path / "tenant").wait()
    for kinds, folder in ((1, "model"), (2, "optim")):  # fp32 weights, and two moments
        saved = [load_file(file) for file in (tmp_path / "tenant").rglob(f"{folder}/*.safetensors")]
        named = {name: value for tensors in saved for name, value in tensors.items() if ".lora_" in name}
        assert sum(value.numel() for value in named.values()) == kinds * 4 * ELEMENTS
        assert not any("base_layer" in name for tensors in saved for name in tensors)
    make_step(pool, "one", one, step=1)
    other = TenantTrainer(pool.create("other", Adapter(4, seed=1)), {})
    other.engine.load_checkpoint(tmp_path / "tenant")
    pool.get("other")
    for call in train(other, "one", 1, pool):
        call()
    state, again = one.engine.full_state_dict(), other.engine.full_state_dict()
    assert not differing(again, state)
    base = placed(pool.base)
    full = pool.create("full", None)
    full.save_checkpoint(tmp_path / "full").wait()
    with torch.no_grad(), full.full_parameters() as parameters:
        for parameter in parameters.values():
            parameter.add_(1.0)
    full.load_checkpoint(tmp_path / "full")
    assert not differing(placed(pool.base), base)
    for name in ("one", "other", "full"):
        pool.drop(name)


@pytest.mark.parametrize(
    ("build", "attention", "perceptron", "head"),
    [
        (models.llama, "q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj", "lm_head"),
        (models.qwen3, "q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj", "lm_head"),
        (models.gpt2, "c_attn c_proj", "c_fc c_proj", "lm_head"),
        (models.decoder, "query key value output", "up down", "head"),
    ],
)
def test_layers_are_found_by_their_roles(build: Any, attention: str, perceptron: str, head: str) -> None:
    model: nn.Module = build()
    for switches, leaves in (((1, 0, 0), attention), ((0, 1, 0), perceptron), ((0, 0, 1), head)):
        found = find_targets(model, Adapter(2, 0, *map(bool, switches)))
        assert {name.rpartition(".")[2] for name in found} == set(leaves.split())
        assert len(found) == (1 if leaves == head else 2 * len(leaves.split()))


def test_pairs_are_drawn_by_seed_and_layer() -> None:
    first, same, other = (adapted(models.llama(), Adapter(3, seed)) for seed in (1, 1, 2))
    named = dict(other.named_parameters())
    for (name, a), b in zip(first.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == (".lora_" in name)
        if "lora_A" in name:
            assert not torch.equal(a, named[name]) and 0 < a.abs().max() <= a.shape[1] ** -0.5
        elif "lora_B" in name:
            assert not a.any()


@pytest.mark.parametrize("grid", ["one rank", "tp2", "pp2", "dp2 ZeRO 3"])
def test_a_fresh_tenant_computes_what_its_base_does(grid: str) -> None:
    drawn = {name: a.detach() for name, a in adapted(models.llama(), Adapter(3, 1)).named_parameters()}

    def body(world: World | None) -> None:
        made = open_pool(world, settings)
        fresh = made.create("fresh", Adapter(3, seed=1))
        batch = {"input_ids": torch.arange(64).view(2, 32) % models.VOCABULARY}
        assert torch.equal(fresh.predict(batch).logits, made.base.predict(batch).logits)
        for name, value in fresh.full_state_dict().items():
            assert ".lora_" not in name or torch.equal(value, drawn[name]), name
        made.close()

    ranks, settings = GRIDS[grid]
    run_thread_ranks(ranks, body)


def folder_logits(folder: str, stage: int, tokens: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Logits of the base and of a new tenant of each kind over a folder, which is opened as the service does."""
    given = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
        "checkpoint": {"init_from": folder},
    }  # fmt: skip
    config = load_config(given, read_world().size)
    pool = TenantPool(lambda: empty_model(Path(folder)), config, TenantLimits(full=1))
    assert pool.base.module.generation_config.eos_token_id == 7  # type: ignore[union-attr]
    engines = (pool.base, pool.create("pair", Adapter(4)), pool.create("full", None))
    found = [engine.predict(tokens).logits for engine in engines]
    pool.close()
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_base_and_tenants_have_the_weights_of_a_folder_of_which_no_rank_has_all(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, ranks: int
) -> None:
    given: Any = mixtral().eval()
    given.generation_config.eos_token_id = 7
    given.save_pretrained(tmp_path)
    tokens = {"input_ids": torch.arange(9)[None] % models.VOCABULARY}
    with torch.no_grad():
        expected = given(**tokens).logits
    if ranks == 1:
        ran = [folder_logits(str(tmp_path), 0, tokens)]
    else:
        ran = run_ranks(folder_logits, ranks, str(tmp_path), 3, tokens)
    for logits in (one for found in ran for one in found):
        assert torch.allclose(logits, expected, atol=1e-6)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no causal language model of Hugging Face"):
        empty_model(tmp_path / "nothing")
