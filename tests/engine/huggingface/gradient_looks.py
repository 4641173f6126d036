"""Runs of the Trainer and of a loop of accelerate in which code looks for gradients on their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.engine.huggingface.counted_models import ARGUMENTS, ROWS, token_rows
from tests.engine.huggingface.host_runs import ENVIRONMENT, small_model
from tests.launches import Launch, Line


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run, as plain data for its processes."""

    folder: str
    config: Mapping[str, Any]
    hooks: tuple[str, ...]
    """Of callbacks of the Trainer; none: a loop of accelerate, which looks before and after ``optimizer.step``."""


def look(line: Line, run: Look) -> None:
    """Say what each look is told."""
    for said in _in_a_loop(run) if not run.hooks else [_in_a_callback(run, hook) for hook in run.hooks]:
        line(said)


def _seen(model: Any) -> str:
    try:
        return f"{len([parameter for parameter in model.parameters() if parameter.grad is not None])} gradients"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _in_a_callback(run: Look, hook: str) -> str:
    import transformers

    from engine.huggingface import Trainer

    said: list[str] = []

    def called(self: Any, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        said.append(_seen(model))

    callback = type("Looking", (transformers.TrainerCallback,), {hook: called})
    changes: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no"}
    trainer: Any = Trainer(
        model=small_model(), args=transformers.TrainingArguments(run.folder, **(ARGUMENTS | changes)),
        train_dataset=token_rows(ROWS, 1), callbacks=[callback()], engine_config=run.config,
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    trainer.train()
    trainer.engine.close()
    (once,) = set(said)
    return once


def _in_a_loop(run: Look) -> list[str]:
    import torch

    from engine.huggingface import Accelerator

    accelerator = Accelerator(engine_config=run.config, cpu=True)
    given = small_model()
    loader: Any = torch.utils.data.DataLoader(token_rows(ROWS, 1), 4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(given, torch.optim.AdamW(given.parameters()), loader)
    said = []
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        said.append(_seen(model))
        optimizer.step()
        said.append(_seen(model))
        optimizer.zero_grad()
        said.append(_seen(model))
        break
    accelerator.end_training()
    return said


def looks(run: Look, ranks: int) -> list[list[str]]:
    """What the looks of each rank are told."""
    with Launch(look, ranks, run, env=ENVIRONMENT) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return [end.said for end in ended]
