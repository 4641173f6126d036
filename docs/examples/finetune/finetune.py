"""Fine-tune a Hugging Face model on prompts and answers, and write it back as a Hugging Face folder."""

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine

LENGTH, EPOCHS = 32, 3


def encode(tokenizer, prompt, answer):
    """One row of tokens; -100 marks what the loss leaves out: the prompt, and the padding behind the answer."""
    asked, told = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    input_ids = torch.full((LENGTH,), tokenizer.eos_token_id)
    labels = torch.full((LENGTH,), -100)
    row = torch.tensor([*asked, *told][:LENGTH])
    input_ids[: len(row)] = row
    labels[len(asked) : len(row)] = row[len(asked) :]
    return {"input_ids": input_ids, "labels": labels}


def loss_fn(output, batch):
    """The sum over the answers' tokens and their number, so that every token counts the same on every grid."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


config, source, data, target = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source)
pairs = [json.loads(line) for line in Path(data).read_text().splitlines()]
dataset = [encode(tokenizer, pair["prompt"], pair["answer"]) for pair in pairs]
model = AutoModelForCausalLM.from_pretrained(source).train()

with engine.initialize(model, config, loss_fn=loss_fn, inputs=["input_ids"]) as eng:
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
        tokenizer.save_pretrained(target)
