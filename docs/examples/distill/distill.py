"""A student of half the layers learns from a frozen teacher: two engines in one script, each with its own grid."""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import engine

LENGTH, EPOCHS, TEMPERATURE = 32, 3, 2.0


def loss_fn(output, batch):
    """Kullback-Leibler divergence from the teacher, summed over all tokens, and their number."""
    student = F.log_softmax(output.logits / TEMPERATURE, dim=-1)
    taught = F.log_softmax(batch["teacher_logits"] / TEMPERATURE, dim=-1)
    return F.kl_div(student, taught, reduction="sum", log_target=True), batch["input_ids"].numel()


def build_student():
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers //= 2
    return AutoModelForCausalLM.from_config(config)


def taught(microbatches):
    """Each microbatch with the teacher's logits beside it."""
    for batch in microbatches:
        with torch.no_grad():
            logits = teacher(batch).logits
        yield batch | {"teacher_logits": logits}


student_config, teacher_config, source, text, target = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(source)(Path(text).read_text(), return_tensors="pt")["input_ids"][0]
dataset = [{"input_ids": row} for row in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)]
teacher = engine.initialize(AutoModelForCausalLM.from_pretrained(source).eval(), teacher_config)
student = engine.initialize(build_student, student_config, loss_fn=loss_fn, inputs=["input_ids"])
with teacher, student:
    sampler = DistributedSampler(dataset, num_replicas=student.grid.dp, rank=student.grid.coord().dp)
    loader = DataLoader(dataset, batch_size=student.config.micro, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        microbatches = taught(loader)
        for _ in range(len(loader) // student.config.accumulation):
            report = student.train_batch(microbatches)
            if student.grid.rank == 0:
                print(f"step {report.step} loss {report.loss:.6f}")
    student.save_pretrained(target)
