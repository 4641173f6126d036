"""Adapters over a base that bitsandbytes holds as codes: losses of one process on data ranks, and those of the same
values, by ``quantize_frozen``, on every other grid."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launches import Launch, Line

pytestmark = pytest.mark.long
ROWS, MICROBATCHES, STEPS = 8, 4, 4
CONFIG: Mapping[str, Any] = {
    "train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}, "checkpoint": {"frozen": False},
}  # fmt: skip
GRIDS: Mapping[str, Mapping[str, Any]] = {
    "dp2": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "tp2": {"parallel": {"tensor": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
}
NF4 = {"quantize_frozen": {"dtype": "nf4"}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, as plain data for its processes."""

    folder: str
    bits: int
    config: Mapping[str, Any] | None = None
    """Beside :data:`CONFIG`; None: a loop of plain torch."""
    dequantized: bool = False
    """The base has the values of its codes."""


def adapted(case: Case) -> Any:
    """A Llama of two layers, as from_pretrained quantizes it, under adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    settings_of: Any = BitsAndBytesConfig
    folder = Path(case.folder, os.environ["RANK"])
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    four: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    kind = {"load_in_4bit": True, **four} if case.bits == 4 else {"load_in_8bit": True}
    quantized: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings_of(**kind), dtype=torch.float32
    )
    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(quantized.dequantize() if case.dequantized else quantized, settings).train()


def batches() -> list[Any]:
    """A batch for each step."""
    import torch

    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(0, 64, (ROWS, 12), generator=drawn) for _ in range(STEPS)]


def train(line: Line, case: Case) -> None:
    """Say the losses of a run; or the sentence of a refusal."""
    import torch

    import engine

    model = adapted(case)
    if case.config is None:
        line(plain_loop(model))
        return
    example = {"input_ids": batches()[0][:2], "labels": batches()[0][:2]}
    torch.manual_seed(0)
    try:
        eng = engine.initialize(model, {**CONFIG, **case.config}, example_batch=example)
    except engine.EngineError as error:
        line(str(error))
        return
    losses = []
    for batch in batches():
        rows = batch.chunk(eng.grid.dp)[eng.grid.coord().dp]
        losses.append(eng.train_batch({"input_ids": rows, "labels": rows}).loss)
        losses.append(eng.eval_batch({"input_ids": rows, "labels": rows}).loss)
    line(losses)


def plain_loop(model: Any) -> list[float]:
    """Losses of training and evaluation by plain torch."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0), []
    for batch in batches():
        model.train()
        total = 0.0
        for rows in batch.chunk(MICROBATCHES):
            loss = model(input_ids=rows, labels=rows).loss / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [total, float(model(input_ids=batch, labels=batch).loss)]
    return losses


def run(case: Case, ranks: int) -> Any:
    """What rank 0 says."""
    quiet = {"TRINE_QUIET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with Launch(train, ranks, case, env=quiet) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return ended[0].said[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of plain torch in one process."""
    done: dict[tuple[int, bool], list[float]] = {}

    def losses(bits: int, dequantized: bool) -> list[float]:
        key = bits, dequantized
        if key not in done:
            folder = str(tmp_path_factory.mktemp("alone"))
            done[key] = run(Case(folder=folder, bits=bits, dequantized=dequantized), 1)
        return done[key]

    return losses


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("grid", ["dp2", "zero1", "zero2"])
def test_data_ranks_train_over_the_codes(grid: str, bits: int, alone: Any, tmp_path: Path) -> None:
    found, expected = run(Case(folder=str(tmp_path), bits=bits, config=GRIDS[grid]), 2), alone(bits, False)
    assert found == pytest.approx(expected, rel=1e-5) and not math.isclose(expected[0], expected[2], rel_tol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("grid", ["zero3", "tp2", "pp2"])
def test_other_grids_refuse_the_codes(grid: str, bits: int, tmp_path: Path) -> None:
    said = run(Case(folder=str(tmp_path), bits=bits, config=GRIDS[grid]), 2)
    assert "and such a weight cannot be sharded; load the model" in said


@pytest.mark.parametrize("grid", ["dp2", "zero3", "tp2", "pp2"])
def test_the_sentence_leads_to_the_same_values_on_every_grid(grid: str, alone: Any, tmp_path: Path) -> None:
    """``quantize_frozen`` finds the codes again: blocks lie in rows, and the largest value of a block is in it."""
    given = Case(folder=str(tmp_path), bits=4, config={**GRIDS[grid], **NF4}, dequantized=True)
    assert run(given, 2) == pytest.approx(alone(4, True), rel=1e-5)
