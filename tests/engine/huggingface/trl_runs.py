"""Runs of TRL's trainers, alone or behind the engine's Trainer, as jobs of a launcher's processes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.huggingface.host_runs import ENVIRONMENT, HEADS, SIZES, dataset, small_model, tokenizer
from tests.launches import Launch, Line

_GENERATED = ("loss", "grad_norm", "reward", "reward_std", "completions/mean_length", "entropy", "eval_loss")
LOGGED = {
    "SFT": ("loss", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss"),
    "DPO": (
        "loss",
        "grad_norm",
        "rewards/margins",
        "logps/chosen",
        "logits/chosen",
        "mean_token_accuracy",
        "eval_loss",
    ),
    "GRPO": (*_GENERATED, "clip_ratio/region_mean"),
    "RLOO": _GENERATED,
    "KTO": ("loss", "grad_norm", "rewards/margins", "logps/chosen", "eval_loss"),
    "Reward": ("loss", "grad_norm", "margin", "eval_loss"),
}
"""Trainer of TRL -> what of its logs is compared."""
GENERATING = ("GRPO", "RLOO")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A run, as plain data for its processes."""

    folder: str
    kind: str = "SFT"
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the host alone."""
    rows: int = 4
    """Of a data rank in a microbatch."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Beside those of every run."""
    adapters: bool = False
    """LoRA adapters are trained, over a frozen base."""


def words() -> Any:
    """A tokenizer of numbers between spaces."""
    from tokenizers import pre_tokenizers

    made: Any = tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made.pad_token = made.eos_token = "0"
    return made


def rows_of(kind: str, count: int, seed: int) -> Any:
    """Rows of tokens, prompts, or pairs of answers to a prompt."""
    from datasets import Dataset

    ids = [row["input_ids"].tolist() for row in dataset(count, seed)]
    if kind == "SFT":
        return Dataset.from_list([{"input_ids": row} for row in ids])
    text = [[" ".join(map(str, part)) for part in (row[:4], row[4:8], row[8:])] for row in ids]
    if kind in GENERATING:  # prompts of different lengths
        return Dataset.from_list([{"prompt": a[: len(a) - 2 * (len(b) % 3)].strip()} for a, b, _ in text])
    if kind == "KTO":
        return Dataset.from_list([{"prompt": a, "completion": f" {b}", "label": len(c) % 2 == 0} for a, b, c in text])
    return Dataset.from_list([{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in text])


def even_words(completions: list[str], **_: Any) -> list[float]:
    """The share of even numbers in each completion."""
    return [sum(int(word) % 2 == 0 for word in each.split()) / (1 + len(each.split())) for each in completions]


def settings_of(case: Tuning) -> dict[str, Any]:
    """The arguments of a run."""
    given: dict[str, Any] = {
        "output_dir": case.folder, "per_device_train_batch_size": case.rows, "per_device_eval_batch_size": case.rows,
        "gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 1e-2, "logging_steps": 1,
        "eval_strategy": "epoch", "save_strategy": "no", "max_grad_norm": 0.5, "report_to": [], "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False, "disable_tqdm": True, "seed": 7,
    }  # fmt: skip
    if case.kind in GENERATING:
        given |= {"num_generations": 4, "max_completion_length": 6, "max_steps": 4}
    else:
        given["max_length"] = None
    return given | dict(case.arguments)


def model_of(case: Tuning) -> Any:
    """The model of a run; where TRL reads the reference from the model's folder, from one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

    if case.kind == "Reward":
        torch.manual_seed(0)
        settings: dict[str, Any] = {**SIZES, **HEADS, "num_labels": 1, "pad_token_id": 0}
        rewarding: Any = LlamaForSequenceClassification
        return rewarding(LlamaConfig(**settings))
    if case.kind not in (*GENERATING, "KTO"):
        return small_model()
    folder = Path(case.folder, f"model-{os.environ.get('RANK', '0')}")
    small_model().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def tune(line: Line, case: Tuning) -> None:
    """Train and evaluate; say what was logged, or the sentence of a refusal."""
    import trl

    from engine.errors import EngineError

    given: dict[str, Any] = {
        "model": model_of(case), "args": getattr(trl, f"{case.kind}Config")(**settings_of(case)),
        "train_dataset": rows_of(case.kind, 32, 1), "eval_dataset": rows_of(case.kind, 8, 2),
        "processing_class": words(),
    }  # fmt: skip
    if case.kind in GENERATING:
        given["reward_funcs"] = even_words
    if case.adapters:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    elif case.kind == "DPO":
        given["ref_model"] = small_model()
    host: Any = getattr(trl, f"{case.kind}Trainer")
    if case.config is None:
        trainer: Any = host(**given)
    else:
        from engine.huggingface import Trainer

        Tuner: Any = type("Tuner", (Trainer, host), {})
        try:
            trainer = Tuner(**given, engine_config=case.config)
        except EngineError as error:
            line(str(error))
            return
    trainer.train()
    history = trainer.state.log_history
    line({name: [entry[name] for entry in history if name in entry] for name in (*LOGGED[case.kind], "kl")})


def run_tuning(case: Tuning, ranks: int) -> Any:
    """What rank 0 says."""
    quiet = ENVIRONMENT | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
    with Launch(tune, ranks, case, env=quiet) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return ended[0].said[0]
