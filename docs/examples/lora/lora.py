"""LoRA by hand: a frozen Hugging Face model in which small pairs of layers learn; only the pairs are saved."""

import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine

LENGTH, EPOCHS, TARGETS = 32, 3, ("q_proj", "v_proj", "down_proj")


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable product of low rank, which is zero at the start."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_down = nn.Linear(base.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x))


def build():
    model = AutoModelForCausalLM.from_pretrained(source).train().requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if name.endswith(TARGETS):
            model.set_submodule(name, LoRA(layer))
    return model


config, source, text, target = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(source)(Path(text).read_text(), return_tensors="pt")["input_ids"][0]
rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
dataset = [{"input_ids": row, "labels": row} for row in rows]

with engine.initialize(build, config) as eng:
    sampler = DistributedSampler(dataset, num_replicas=eng.grid.dp, rank=eng.grid.coord().dp)
    loader = DataLoader(dataset, batch_size=eng.config.micro, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        microbatches = iter(loader)
        for _ in range(len(loader) // eng.config.accumulation):
            report = eng.train_batch(microbatches)
            if eng.grid.rank == 0:
                print(f"step {report.step} loss {report.loss:.6f}")
    weights = eng.full_state_dict()
    if eng.grid.rank == 0:
        save_file({name: weight for name, weight in weights.items() if ".lora_" in name}, target)
