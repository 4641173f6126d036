"""Supervised fine-tuning on a text file with TRL; started again, it goes on where it ended."""

import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from engine.huggingface import Trainer

config, source, text, folder = sys.argv[1:5]


class SFTTrainer(Trainer, trl.SFTTrainer):
    """TRL's trainer over the engine."""


tokenizer = AutoTokenizer.from_pretrained(source)
lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()][:20]
rows = Dataset.from_list([{"text": line} for line in lines])
arguments = trl.SFTConfig(
    output_dir=folder,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    num_train_epochs=2,
    max_length=48,
    eval_strategy="epoch",
    save_strategy="epoch",
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(source),
    args=arguments,
    train_dataset=rows.select(range(4, 20)),
    eval_dataset=rows.select(range(4)),
    processing_class=tokenizer,
    engine_config=config,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).exists() else None)
loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"validation loss {loss:.5f}")
