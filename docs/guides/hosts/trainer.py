"""Fine-tune a causal model on a text file with Hugging Face's Trainer; started again, it goes on where it ended."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from engine.huggingface import Trainer

config, source, text, folder = sys.argv[1:5]
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(source)
ids = tokenizer(Path(text).read_text(encoding="utf-8"))["input_ids"]
rows = [{"input_ids": ids[start : start + 32]} for start in range(0, len(ids) - 31, 32)]


def compute_metrics(found):
    predicted, labels = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}


arguments = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_steps=2,
    num_train_epochs=2,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=rows[4:],
    eval_dataset=rows[:4],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
    engine_config=config,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).exists() else None)
trainer.save_model()
