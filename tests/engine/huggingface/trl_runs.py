"""Runs of TRL's SFTTrainer, alone or composed with the engine's Trainer, as jobs of a launcher's processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.engine.huggingface.host_runs import ENVIRONMENT, dataset, small_model, tokenizer
from tests.launches import Launch, Line


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A run, as plain data for its processes."""

    folder: str
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the host alone."""
    rows: int = 4
    """Of a data rank in a microbatch."""


def tune(line: Line, case: Tuning) -> None:
    """Train and evaluate; say losses, accuracies and losses of evaluation, or the sentence of a refusal."""
    import trl
    from datasets import Dataset

    from engine.errors import ConfigError

    arguments = trl.SFTConfig(
        output_dir=case.folder, per_device_train_batch_size=case.rows, per_device_eval_batch_size=case.rows,
        gradient_accumulation_steps=2, num_train_epochs=1, learning_rate=1e-2, logging_steps=1, eval_strategy="epoch",
        save_strategy="no", max_grad_norm=0.5, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        dataloader_pin_memory=False, disable_tqdm=True, seed=7, max_length=None,
    )  # fmt: skip
    rows, held_out = (Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in dataset(count, seed)])
                      for count, seed in ((32, 1), (8, 2)))  # fmt: skip
    words: Any = tokenizer()
    words.pad_token = words.eos_token = "0"
    given: dict[str, Any] = {
        "model": small_model(), "args": arguments, "train_dataset": rows, "eval_dataset": held_out,
        "processing_class": words,
    }  # fmt: skip
    if case.config is None:
        trainer: Any = trl.SFTTrainer(**given)
    else:
        from engine.huggingface import Trainer

        class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc]
            pass

        try:
            trainer = SFTTrainer(**given, engine_config=case.config)
        except ConfigError as error:
            line(str(error))
            return
    trainer.train()
    history = trainer.state.log_history
    line({name: [entry[name] for entry in history if name in entry] for name in
          ("loss", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss")})  # fmt: skip


def run_tuning(case: Tuning, ranks: int) -> Any:
    """What rank 0 says."""
    quiet = ENVIRONMENT | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
    with Launch(tune, ranks, case, env=quiet) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return ended[0].said[0]
