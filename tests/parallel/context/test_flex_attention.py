"""Models with flex attention train as one process on every grid; torch alone refuses their backward on CPUs."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import engine
from engine.kernels.ops.flex_attention import FULL, PARTIAL, block_kinds, over_places
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.tensor.global_tensor.flex_parts import FlexPart
from engine.parallel.tensor.global_tensor.index_runs import indices_of
from engine.verify import PLAIN, Parity, train_alone, train_on_grid, verify
from tests.parallel.context.flex_models import MASKS, DenseAttention, FlexModel, batches_of
from tests.parallel.context.test_context_training import config_of
from tests.planned_traffic import traffic_differs
from tests.selection import wide

GRIDS: dict[str, dict[str, int]] = {
    "cp2": {"context": 2},
    "cp3": {"context": 3},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2": {"data": 2},
    "cp2 x tp2": {"context": 2, "tensor": 2},
    "cp2 x pp2": {"context": 2, "pipeline": 2},
    "dp2 x cp2": {"data": 2, "context": 2},
}
OFTEN = (("cp3", "documents", 128), ("cp2 x tp2", "windows by head", 8))
LENGTH = 80


def flex_config(grid: dict[str, int], **more: Any) -> dict[str, Any]:
    return config_of({"data": 1, **grid}, train_batch_size=2, **more)


def check_parity(grid: dict[str, int], mask: str, block: int, **more: Any) -> None:
    config = flex_config(grid, **more)
    threads = int(np.prod(list(grid.values())))
    dense = partial(FlexModel, mask, block, DenseAttention)
    check_same(partial(FlexModel, mask, block), dense, config, threads, batches_of(LENGTH))


def check_same(build: Any, dense: Any, config: dict[str, Any], threads: int, batches: Any) -> None:
    """Compare the engine on some ranks with plain torch in one process, without flex attention."""
    ranks = run_thread_ranks(threads, partial(train_on_grid, build, config, batches, PLAIN))
    alone = World(0, threads, 0, torch.device("cpu"))
    result = Parity(ranks[0], train_alone(dense, config, batches, PLAIN, alone))
    assert result.holds(), str(result)


@pytest.mark.parametrize(
    ("grid", "mask", "block"),
    [
        (grid, mask, block) if (grid, mask, block) in OFTEN else wide(grid, mask, block)
        for grid in GRIDS
        for mask in MASKS
        for block in (8, 128)
    ],
)
def test_every_grid_trains_as_one_process(grid: str, mask: str, block: int) -> None:
    check_parity(GRIDS[grid], mask, block)


@pytest.mark.long
def test_verify_compares_them_on_a_cpu() -> None:
    result = verify(FlexModel, flex_config({"context": 2}), batches_of(LENGTH), threads=2)
    assert result is not None and result.holds(), str(result)


@pytest.mark.long
@pytest.mark.parametrize("more", [{"zero_optimization": {"stage": 3}}, {"activation_checkpointing": {"mode": "full"}}])
def test_so_do_stages_and_recomputation(more: dict[str, Any]) -> None:
    check_parity({"data": 2, "context": 2}, "documents", 8, **more)


def _differs(world: World) -> list[str]:
    batches = batches_of(LENGTH)
    example = {name: tensor[:1] for name, tensor in batches[0].items()}
    with engine.initialize(FlexModel(), flex_config({"context": 2}), example_batch=example, world=world) as eng:
        assert any("2 attentions by gather (flex attention)" in note for note in eng.plan.notes), eng.plan.notes
        return traffic_differs(eng, lambda eng, step: batches[step], range(2))


def test_sent_bytes_are_the_planned_ones() -> None:
    assert run_thread_ranks(2, _differs) == [[], []]


RUNS: tuple[tuple[tuple[int, int], ...], ...] = (((0, 16), (32, 40)), ((8, 24),), ((5, 9), (17, 40)), ((0, 3),))


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_part_of_a_mask_has_the_rows_and_heads_of_the_whole(mask: str, runs: tuple[tuple[int, int], ...]) -> None:
    """Blocks without a visible key are not computed, full ones without a look at the function."""
    given = MASKS[mask](batches_of(40)[0]["document_ids"])
    whole = create_block_mask(given, 2, 4, 40, 40, device="cpu", BLOCK_SIZE=8)
    heads = torch.tensor([1, 3])
    queries = torch.as_tensor(indices_of(np.array(runs)))
    part = FlexPart.of(torch.device("cpu"), heads=np.array([[1, 2], [3, 4]]), queries=np.array(runs)).mask(whole)
    assert isinstance(part, BlockMask) and part.seq_lengths == (len(queries), 40)
    assert torch.equal(_visible(part), _visible(whole)[:, heads][:, :, queries])


def test_heads_with_equal_blocks_share_them() -> None:
    whole = create_block_mask(lambda b, h, q, k: q - k < 4 * h + 1, None, None, 40, 40, device="cpu", BLOCK_SIZE=8)
    part = FlexPart.of(torch.device("cpu"), heads=np.array([[2, 4]])).mask(whole)
    assert part.kv_indices is whole.kv_indices
    head, q, k = torch.tensor(1), torch.tensor(12), torch.tensor(0)
    assert part.mask_mod(head, head, q, k) and not whole.mask_mod(head, head, q, k)


def _visible(mask: BlockMask) -> torch.Tensor:
    """Return True [B, G, Q, K] where a kernel would see a key."""
    rows, heads = mask.kv_num_blocks.shape[:2]
    places = [torch.arange(size) for size in (rows, heads, *mask.seq_lengths)]
    kinds = block_kinds(mask)[:, :, places[2] // mask.BLOCK_SIZE[0]][..., places[3] // mask.BLOCK_SIZE[1]]
    found: torch.Tensor = (kinds == FULL) | ((kinds == PARTIAL) & over_places(mask.mask_mod, places))
    return found


def _transformers(name: str, attention: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    }  # fmt: skip
    more = {"sliding_window": 24, "attn_logit_softcapping": 3.0} if name == "Gemma2" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    assert model.config._attn_implementation == attention
    return model


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("Gemma2", "cp2"),
        *(wide(name, grid) for name in ("Gemma2", "Llama") for grid in GRIDS if (name, grid) != ("Gemma2", "cp2")),
    ],
)
def test_models_of_transformers_train_as_with_eager_attention(name: str, grid: str) -> None:
    """Sliding windows, capped scores, padding."""
    batches = []
    for batch in batches_of(LENGTH):
        mask = torch.ones_like(batch["input_ids"])
        mask[1, LENGTH - 20 :] = 0
        batches.append({"input_ids": batch["input_ids"], "attention_mask": mask, "labels": batch["labels"]})
        batches[-1]["labels"][mask == 0] = -100
    config, threads = flex_config(GRIDS[grid]), int(np.prod(list(GRIDS[grid].values())))
    build = partial(_transformers, name)
    check_same(partial(build, "flex_attention"), partial(build, "eager"), config, threads, batches)
