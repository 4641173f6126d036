"""Training with sequences sharded over context ranks equals one process, in unchanged models."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.context.choose import Method
from engine.verify import verify
from tests import models
from tests.engine.parity.tensor_models import FOUR, UNSEEN
from tests.planned_traffic import traffic_differs
from tests.selection import wide

FIRST = ("Llama", "nanoGPT-like", "BLOOM")
"""Families of the default suite: eager products and torch's attention; long are encoders with a decoder."""
NO_SEQUENCE = ("ViT", "convolutions", "XLNet", "Swin", "ConvNeXt")
"""Models whose first operation reads no token ids or rows of the batch."""
FAMILIES = {name.removesuffix(" (4 heads)"): family for name, family in {**FOUR, **UNSEEN}.items()}
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "cp2": ({"data": 1, "context": 2}, 1),
    "dp2 x cp2, ZeRO 3": ({"data": 2, "context": 2}, 3),
    "cp3": ({"data": 1, "context": 3}, 2),
    "cp4": ({"data": 1, "context": 4}, 0),
}


def config_of(parallel: Mapping[str, Any], stage: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "parallel": dict(parallel),
        "zero_optimization": {"stage": stage},
        **more,
    }


def check_parity(build: Any, batches: Any, layout: str, loss_fn: Any = None, **more: Any) -> None:
    parallel, stage = LAYOUTS[layout]
    threads = parallel["data"] * parallel["context"]
    result = verify(build, config_of(parallel, stage, **more), batches, loss_fn, threads=threads)
    assert result is not None and result.holds(), str(result)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a model without a type of token
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (name, layout) if name in FIRST and layout == "cp2" else wide(name, layout)
        for name in FAMILIES
        if name not in NO_SEQUENCE
        for layout in LAYOUTS
    ],
)
def test_families_train_as_one_process(family: str, layout: str) -> None:
    found = FAMILIES[family]
    check_parity(found.build, found.batches(4), layout, found.loss_fn)


def llama(attention: str = "sdpa", layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def batches_of(form: str, length: int = 36) -> list[dict[str, Tensor]]:
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        ids = torch.randint(0, 61, (4, length), generator=draw)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if form in ("left", "right"):
            mask = torch.ones_like(ids)
            for row, count in enumerate((3, 0, 11, 20)):
                mask[row, :count] = 0
            batch["attention_mask"] = mask if form == "left" else mask.flip(1)
            batch["labels"][batch["attention_mask"] == 0] = -100
        if form == "packed":
            starts = torch.tensor([0, 7, 8, 21])
            place = torch.arange(length)
            batch["position_ids"] = (place - starts[(place[:, None] >= starts).sum(1) - 1]).expand(4, -1).contiguous()
        if form == "a rank without labels":
            batch["labels"][:, length // 4 : -(length // 4)] = -100  # all positions of rank 1
        found.append(batch)
    return found


@pytest.mark.parametrize(
    ("form", "attention", "layout"),
    [
        case if case == ("left", "sdpa", "cp2") else wide(*case)
        for case in product(("plain", "left", "right", "packed", "a rank without labels"), ("sdpa", "eager"), LAYOUTS)
    ],
)
def test_masks_and_positions_stay_as_they_are(form: str, attention: str, layout: str) -> None:
    check_parity(lambda: llama(attention), batches_of(form), layout)


@pytest.mark.parametrize(
    ("method", "form", "layout"),
    [
        case if case == ("ring", "packed", "cp2") else wide(*case)
        for case in product(get_args(Method), ("plain", "left", "packed"), LAYOUTS)
    ],
)
def test_every_method_trains_as_one_process(method: Method, form: str, layout: str) -> None:
    parallel, stage = LAYOUTS[layout]
    asked: dict[str, Any] = parallel | {"context": {"size": parallel["context"], "method": method}}
    threads = parallel["data"] * parallel["context"]
    result = verify(llama, config_of(asked, stage), batches_of(form, 37), None, threads=threads)
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize("method", [wide(method) for method in get_args(Method)])
@pytest.mark.parametrize("more", [{"sequence_parallel": True}, {}], ids=str)
def test_every_method_trains_with_tensor_ranks(method: Method, more: dict[str, Any]) -> None:
    asked = {"data": 1, "tensor": 2, "context": {"size": 2, "method": method}, **more}
    result = verify(llama, config_of(asked), batches_of("packed", 36), None, threads=4)
    assert result is not None and result.holds(), str(result)


@pytest.mark.long
@pytest.mark.parametrize("length", [37, wide(8), wide(64)])
def test_any_length_trains(length: int) -> None:
    check_parity(llama, batches_of("plain", length), "cp3")


@pytest.mark.parametrize(
    "more",
    [
        wide({"activation_checkpointing": {"mode": "full"}}),
        wide({"activation_checkpointing": {"mode": "selective"}}),
        wide({"integrity": {"every": 1}}),
        wide({"ema": {"decay": 0.9}}),
        wide({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}),
        wide({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
        wide({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
    ],
    ids=str,
)
def test_settings_compose(more: dict[str, Any]) -> None:
    parallel = {"data": 2, "context": 2}
    result = verify(llama, config_of(parallel) | more, batches_of("plain"), None, threads=4)
    assert result is not None and result.holds(), str(result)


def test_a_weighted_loss_function_reads_sharded_logits() -> None:
    def loss_fn(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        wanted = batch["labels"][:, 1:]
        losses = nn.functional.cross_entropy(
            output.logits[:, :-1].transpose(1, 2), wanted, ignore_index=-100, reduction="none"
        )
        return losses.sum(), (wanted != -100).sum()

    check_parity(llama, batches_of("left"), "cp2", loss_fn)


def _train(world: Any) -> tuple[list[str], dict[str, int], Tensor]:
    with engine.initialize(llama(), config_of({"data": 1, "context": 2}), world=world) as eng:
        batches = batches_of("plain", 32)
        eng.train_batch(batches[0])
        differs = traffic_differs(eng, lambda _, step: batches[step], [1])
        sent = {row.label: row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == "cp"}
        return differs, sent, eng.predict({"input_ids": batches[0]["input_ids"]}).logits


def test_planned_bytes_are_counted_bytes_and_those_of_the_formula() -> None:
    layers, microbatches, length, keys, ranks = 2, 4, 32, 16, 2
    one_way = 2 * length * keys * 4 * (ranks - 1) // ranks  # keys and values, fp32
    for differs, sent, logits in run_thread_ranks(2, _train):
        assert not differs, differs
        assert sent["keys"] == layers * microbatches * 2 * one_way  # once more in backward
        assert sent["key gradients"] == layers * microbatches * one_way
        assert sent["loss"] == microbatches * 2 * 8  # sum and count, forward and backward
        assert logits.shape == (4, 32, 61) and type(logits) is Tensor


@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", wide("eager")])
def test_embeddings_in_the_batch_are_sharded(attention: str) -> None:
    draw, made = torch.Generator().manual_seed(2), batches_of("left")
    for batch in made:
        batch["inputs_embeds"] = torch.randn(*batch.pop("input_ids").shape, 32, generator=draw)
    check_parity(lambda: llama(attention), made, "cp2")


def _loss_of_logits(eng: engine.Engine, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of the model, computed by a script that scales it in place."""
    logits = eng({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}).logits
    logits /= 1.0
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss *= 1.0
    return loss


def _own_loop(parallel: Mapping[str, int], loss: str, world: Any) -> dict[str, Tensor]:
    """Returns the weights, and the norms of the steps."""
    norms = []
    with engine.initialize(llama(), config_of(parallel), world=world) as eng:
        for batch in batches_of("left"):
            if loss == "of a step":
                norms.append(eng.train_batch(batch).grad_norm)
                continue
            for row in range(4):
                one = {name: x[row : row + 1] for name, x in batch.items()}
                eng.backward(_loss_of_logits(eng, one) if loss == "of logits" else eng(one).loss)
                report = eng.step()
            norms.append(report.grad_norm if report is not None else 0.0)
        return {**eng.full_state_dict(), "norms": torch.tensor(norms)}


OWN_LOOPS = [
    {"context": 2}, {"context": 3}, {"context": 2, "tensor": 2}, {"context": 2, "tensor": 2, "sequence_parallel": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "loss"),
    [
        (parallel, loss) if parallel == {"context": 2} else wide(parallel, loss)
        for parallel in OWN_LOOPS
        for loss in ("of the model", "of logits")
    ],
    ids=str,
)
def test_the_loop_of_a_script_trains_as_train_batch(parallel: dict[str, int], loss: str) -> None:
    sizes = {"data": 1, **parallel}
    ranks = parallel["context"] * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    own, whole = (run_thread_ranks(ranks, partial(_own_loop, sizes, each))[0] for each in (loss, "of a step"))
    for name, weight in whole.items():
        torch.testing.assert_close(own[name], weight, rtol=0, atol=1e-5)


def _refused(world: Any) -> str:
    with (
        pytest.raises(EngineError) as caught,
        engine.initialize(llama(), config_of({"data": 1, "context": 2}), world=world) as eng,
    ):
        eng.train_batch(batches_of("plain", 3)[0])
    return str(caught.value)


def test_a_short_sequence_is_refused_in_one_sentence_on_all_ranks() -> None:
    first, second = run_thread_ranks(2, _refused)
    assert first == second and "[1, 3]" in first and "at least 4 positions" in first


def _lengths(world: Any) -> str:
    batch = batches_of("plain", 12 + 4 * world.rank)[0]
    with (
        pytest.raises(EngineError) as caught,
        engine.initialize(llama(), config_of({"data": 1, "context": 2}), world=world) as eng,
    ):
        eng.train_batch(batch)
    return str(caught.value)


def test_lengths_that_differ_by_rank_are_refused_in_one_sentence_on_all_ranks() -> None:
    first, second = run_thread_ranks(2, _lengths)
    assert first == second and "rank 0 and rank 1 were given different batches" in first


def _moved(folder: str, parallel: dict[str, int], steps: tuple[int, ...]) -> list[float]:
    """Body of a rank: loads a checkpoint, unless it starts at step 0, trains ``steps``, and saves."""
    with engine.initialize(llama(), config_of(parallel, 2, checkpoint={"folder": folder})) as eng:
        if steps[0]:
            eng.load_checkpoint()
        rows = 4 // eng.grid.row_ranks
        own = [
            {name: x[eng.grid.row_rank * rows :][:rows] for name, x in batches_of("plain")[step].items()}
            for step in steps
        ]
        losses = [eng.train_batch(batch).loss for batch in own]
        eng.save_checkpoint()
    return losses


@pytest.mark.long
def test_a_checkpoint_of_context_ranks_loads_on_data_ranks(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    first = run_ranks(_moved, 2, str(tmp_path / "moved"), {"data": 1, "context": 2}, (0, 1))[0]
    second = run_ranks(_moved, 2, str(tmp_path / "moved"), {"data": 2}, (2,))[0]
    whole = run_ranks(_moved, 2, str(tmp_path / "whole"), {"data": 2}, (0, 1, 2))[0]
    assert torch.allclose(torch.tensor(first + second), torch.tensor(whole), rtol=1e-6)


@pytest.mark.parametrize("family", [wide(name) for name in NO_SEQUENCE])
def test_models_without_a_sequence_are_refused(family: str) -> None:
    found = FAMILIES[family]
    with pytest.raises(EngineError, match=r"parallel\.context"):
        verify(found.build, config_of({"data": 1, "context": 2}), found.batches(4), found.loss_fn, threads=2)


def test_dropout_draws_other_masks_on_each_rank() -> None:
    def masks(world: Any) -> Tensor:
        with engine.initialize(models.gpt2(dropout=0.5), config_of({"data": 1, "context": 2}), world=world) as eng:
            report = eng.train_batch(models.batches_for("gpt2", 4, 1)[0])
            return torch.tensor([report.loss, report.grad_norm])

    first, second = run_thread_ranks(2, masks)
    assert torch.equal(first, second) and bool(first.isfinite().all())


def _losses(method: str, world: Any = None) -> list[float]:
    asked = {"data": 1, "context": {"size": 2, "method": method}}
    with engine.initialize(llama(), config_of(asked), world=world) as eng:
        return [eng.train_batch(batch).loss for batch in batches_of("packed", 37)]


@pytest.mark.parametrize("method", [wide(method) for method in get_args(Method)])
def test_processes_train_as_threads(method: Method, run_ranks: Callable[..., list[Any]]) -> None:
    threads = run_thread_ranks(2, lambda world: _losses(method, world))
    for found, wished in zip(run_ranks(_losses, 2, method), threads, strict=True):
        assert found == pytest.approx(wished, rel=1e-6)
