"""Logits of a sequence that context ranks share are computed by the loss in chunks, and never exist in full."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.kernels.ops import linear_cross_entropy as chunks
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.planning.activation_memory import LiveStorages
from engine.verify import verify
from tests.parallel.context.test_context_training import batches_of, config_of, llama
from tests.planned_traffic import traffic_differs
from tests.selection import wide

LossFunction = Callable[[Any, dict[str, Tensor]], Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LEAST_CHUNK", 4)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of lazy logits that were computed."""
    found, read = list[tuple[int, ...]](), inspect.getattr_static(ShardedLogits, "part").fget

    def part(logits: ShardedLogits) -> Any:
        if logits.waits:
            found.append(tuple(logits.shape))
        return read(logits)

    monkeypatch.setattr(ShardedLogits, "part", property(part))
    return found


def _shifted(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The idiom of scripts: logits and labels meet across the borders of ranks."""
    logits: Tensor = output.logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def _weighted(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    wanted = batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(
        output.logits[:, :-1].float().transpose(1, 2), wanted, ignore_index=-100, reduction="none"
    )
    return losses.sum(), (wanted != -100).sum()


LOSSES: dict[str, LossFunction | None] = {"of the model": None, "shifted": _shifted, "weighted": _weighted}
GRIDS: dict[str, dict[str, Any]] = {
    "cp2": {"context": 2},
    "cp3": {"context": 3},
    "dp2 x cp2": {"data": 2, "context": 2},
    "cp2 x tp2": {"context": 2, "tensor": 2},
    "cp2 x tp2, sequence parallel": {"context": 2, "tensor": 2, "sequence_parallel": True},
    "cp2 x pp2": {"context": 2, "pipeline": 2},
}
FIRST = (
    ("of the model", "left", "cp2"),
    ("shifted", "a rank without labels", "cp2"),
)


@pytest.mark.parametrize(
    ("loss", "form", "grid"),
    [
        case if case in FIRST else wide(*case)
        for case in (
            (loss, form, grid)
            for loss in LOSSES
            for form in ("plain", "left", "packed", "a rank without labels")
            for grid in GRIDS
        )
    ],
)
def test_logits_in_chunks_train_as_one_process(loss: str, form: str, grid: str, computed: list[Any]) -> None:
    parallel = {"data": 1, **GRIDS[grid]}
    config = config_of(parallel, kernels="reference")
    ranks = config["parallel"]["data"]
    for axis in ("context", "tensor", "pipeline"):
        ranks *= parallel.get(axis, 1)
    result = verify(llama, config, batches_of(form), LOSSES[loss], threads=ranks)
    assert result is not None and result.holds(), str(result)
    assert not computed


@pytest.mark.parametrize(
    ("loss", "grid"),
    [
        (loss, grid) if (loss, grid) == ("shifted", "cp2") else wide(loss, grid)
        for loss in LOSSES
        for grid in (*GRIDS, "dp2")
    ],
)
@pytest.mark.parametrize("tied", [False, wide(True)])
def test_gathered_heads_train_as_one_process(loss: str, grid: str, tied: bool, computed: list[Any]) -> None:
    """At ZeRO 3, with microbatches whose backward follows later (GPipe)."""
    parallel = {"data": 1, **GRIDS.get(grid, {"data": 2})}
    if "pipeline" in parallel:
        parallel["schedule"] = "gpipe"
    ranks = math.prod(parallel.get(axis, 1) for axis in ("data", "context", "tensor", "pipeline"))
    result = verify(
        partial(_llama, tied), config_of(parallel, 3, kernels="reference"), batches_of("left"), LOSSES[loss],
        threads=ranks,
    )  # fmt: skip
    assert result is not None and result.holds(), str(result)
    assert not computed or (tied and "pipeline" in parallel)


def _llama(tied: bool) -> nn.Module:
    model: Any = llama()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model  # type: ignore[no-any-return]


class HeadFirst(nn.Module):
    """Model with a head whose module is called before others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.table(input_ids)
        logits = self.head(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + x.square().mean()
        return {"loss": loss, "logits": logits}


def _notes(stage: int, world: World) -> list[str]:
    with engine.initialize(
        HeadFirst(), config_of({"data": 1, "context": 2}, stage, kernels="reference"), world=world
    ) as eng:
        eng.train_batch(batches_of("plain")[0])
        return [note for note in eng.plan.notes if "all logits of head" in note]


def test_a_head_before_other_modules_computes_its_logits_at_zero_3() -> None:
    assert run_thread_ranks(2, partial(_notes, 2))[0] == []
    assert len(run_thread_ranks(2, partial(_notes, 3))[0]) == 1
    result = verify(
        HeadFirst, config_of({"data": 1, "context": 2}, 3, kernels="reference"), batches_of("plain"), None, threads=2
    )
    assert result is not None and result.holds(), str(result)


def _read_late(world: World) -> str:
    config = config_of({"data": 2}, 3, kernels="reference")
    with engine.initialize(llama(), config, example_batch=batches_of("plain")[0], world=world) as eng:
        output = eng(batches_of("plain")[0])
        eng.backward(output.loss)
        with pytest.raises(engine.EngineError) as caught:
            output.logits.argmax(-1)
        return str(caught.value)


def test_logits_that_are_read_first_after_the_backward_have_a_sentence_at_zero_3() -> None:
    (told, _) = run_thread_ranks(2, _read_late)
    assert "ZeRO 3 has freed the weight" in told and "read them before eng.backward()" in told


LENGTH, VOCABULARY = 1024, 2048


def _wide_head() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _peak(kernels: str, ranks: int, stage: int, world: World) -> tuple[int, list[str]]:
    """Returns the peak bytes of live storage of a step beyond those before it, and differences to the plan."""
    ids = torch.arange(LENGTH).remainder(VOCABULARY)[None]
    batch = {"input_ids": ids, "labels": ids.clone()}
    settings = config_of({"data": 1, "context": ranks}, stage, kernels=kernels) | {"train_batch_size": 1}
    with engine.initialize(_wide_head(), settings, world=world) as eng:
        eng.train_batch(batch)
        live = LiveStorages()
        with live:
            eng.train_batch(batch)
        return live.peak, traffic_differs(eng, lambda _, step: batch, [1])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [2, wide(4)])
def test_no_rank_stores_the_logits_of_its_positions(ranks: int, stage: int) -> None:
    logits = 4 * LENGTH * VOCABULARY // ranks
    for peak, differs in run_thread_ranks(ranks, partial(_peak, "reference", ranks, stage)):
        assert peak < logits, f"{peak} bytes live"
        assert not differs, differs
    assert all(peak > 2 * logits for peak, _ in run_thread_ranks(ranks, partial(_peak, "auto", ranks, stage)))
