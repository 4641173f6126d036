"""LoRA through the Trainer trains as in the Trainer alone, and leaves a folder of its adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.host_runs import ENVIRONMENT, HEADS, SIZES, TOKENS, VOCABULARY
from tests.launches import Launch, Line

GRIDS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "dp2": (2, 2, {}),
    "zero3": (2, 2, {"zero_optimization": {"stage": 3}}),
    "tp2": (2, 4, {"parallel": {"tensor": 2}}),
    "pp2": (2, 4, {"parallel": {"pipeline": 2}}),
}
"""Processes, rows of a data rank, configuration."""
pytestmark = pytest.mark.long  # every run imports transformers' Trainer in each rank


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A run, as plain data for its processes."""

    folder: str
    rows: int
    config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def base() -> Any:
    """A small Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Random text."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    found = [torch.randint(0, VOCABULARY, (TOKENS,), generator=drawn) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def train(line: Line, run: Adapted) -> None:
    """Three steps and an evaluation; say losses, norms and the files of the saved folder."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from transformers.trainer_callback import PrinterCallback

    plain = base()
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    arguments = transformers.TrainingArguments(
        run.folder, per_device_train_batch_size=run.rows, per_device_eval_batch_size=4, gradient_accumulation_steps=2,
        max_steps=3, learning_rate=1e-2, adam_epsilon=1e-5, max_grad_norm=0.05, logging_steps=1, eval_strategy="steps",
        eval_steps=3, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    given: dict[str, Any] = {
        "model": get_peft_model(plain, lora), "args": arguments, "train_dataset": rows(24, 1),
        "eval_dataset": rows(8, 2),
    }  # fmt: skip
    kind: Any = transformers.Trainer
    if run.config is not None:
        from engine.huggingface import Trainer

        kind, given = Trainer, given | {"engine_config": run.config}
    trainer = kind(**given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(run.folder)
    names = ("loss", "grad_norm", "eval_loss")
    line([entry[each] for entry in trainer.state.log_history for each in names if each in entry])
    if run.config is not None:
        trainer.engine.close()


def account(run: Adapted, ranks: int) -> list[float]:
    """Rank 0's losses and norms."""
    with Launch(train, ranks, run, env=ENVIRONMENT) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    found: list[float] = ended[0].said[0]
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("grid", GRIDS)
def test_lora_through_the_trainer_is_that_of_the_trainer_alone(grid: str, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    ranks, count, config = GRIDS[grid]
    host = account(Adapted(folder=str(tmp_path / "host"), rows=count), ranks if count == 2 else 1)
    found = account(Adapted(folder=str(tmp_path / "found"), rows=count, config=config), ranks)
    assert len(host) == 7 and found == pytest.approx(host, rel=1e-5)
    files = sorted(file.name for file in (tmp_path / "found").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    loaded: Any = PeftModel.from_pretrained(base(), tmp_path / "found").eval()
    held = {key: torch.stack([row[key] for row in rows(8, 2)]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        assert float(loaded(**held).loss) == pytest.approx(found[-1], rel=1e-5)
