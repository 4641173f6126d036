"""Train a model on rewards of its own completions with TRL's GRPO; started again, it goes on where it ended."""

import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from engine.huggingface import Trainer

config, source, text, folder = sys.argv[1:5]


class GRPOTrainer(Trainer, trl.GRPOTrainer):
    """TRL's trainer over the engine."""


def letters(completions, **columns):
    """The reward of each completion: how many of its characters are letters."""
    return [sum(map(str.isalpha, each)) / max(len(each), 1) for each in completions]


lines = [line[:40] for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()][:20]
arguments = trl.GRPOConfig(
    output_dir=folder,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    beta=0.04,
    learning_rate=1e-2,
    max_steps=4,
    logging_steps=1,
    save_steps=2,
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(source),
    reward_funcs=letters,
    args=arguments,
    train_dataset=Dataset.from_list([{"prompt": line} for line in lines]),
    processing_class=AutoTokenizer.from_pretrained(source),
    engine_config=config,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).exists() else None)
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
if trainer.is_world_process_zero():
    print(f"rewards {rewards}")
