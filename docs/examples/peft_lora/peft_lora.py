"""LoRA with PEFT: adapters on every linear layer of a Hugging Face model; the adapters are saved, and merged."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine

LENGTH, EPOCHS = 32, 3

config, source, text, target = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(source)(Path(text).read_text(), return_tensors="pt")["input_ids"][0]
rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
dataset = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)  # every rank passes the same adapters
adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(AutoModelForCausalLM.from_pretrained(source).train(), adapters)

with engine.initialize(model, config) as eng:
    sampler = DistributedSampler(dataset, num_replicas=eng.grid.dp, rank=eng.grid.coord().dp)
    loader = DataLoader(dataset, batch_size=eng.config.micro, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        microbatches = iter(loader)
        for _ in range(len(loader) // eng.config.accumulation):
            report = eng.train_batch(microbatches)
            if eng.grid.rank == 0:
                print(f"step {report.step} loss {report.loss:.6f}")
    eng.save_pretrained(target)
    if eng.grid.rank == 0:
        tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), target)
        tuned.merge_and_unload().save_pretrained(f"{target}-merged")
