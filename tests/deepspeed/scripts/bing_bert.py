"""Pre-training of a BERT in the shape of bing_bert: LAMB by groups that leave out the pooler, rates set by hand."""

import argparse
import json

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(43, 16)
        self.LayerNorm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.pooler = nn.Linear(16, 16)
        self.predictions = nn.Linear(16, 43)

    def forward(self, ids, labels):
        hidden = self.LayerNorm(self.embed(ids))
        for layer in self.layers:
            hidden = hidden + layer(hidden).cumsum(1) / ids.shape[1]
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        loss = nn.functional.cross_entropy(self.predictions(hidden).flatten(0, 1), labels.flatten())
        return loss + 0.0 * pooled.sum()


def warmup_linear_decay(step, warmup=2, total=6):
    return step / warmup if step < warmup else (total - step) / (total - warmup)


deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = Bert()
pooler = model.pooler.weight.detach().clone()
named = [(n, p) for n, p in model.named_parameters() if "pooler" not in n]
no_decay = ("bias", "LayerNorm.weight")
groups = [
    {"params": [p for n, p in named if not any(word in n for word in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(word in n for word in no_decay)], "weight_decay": 0.0},
]
with open(args.deepspeed_config) as file:
    base = json.load(file)["optimizer"]["params"]["lr"]
network, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
print("rate", base if network.optimizer_name() == "lamb" else 0)
rows, total = network.train_micro_batch_size_per_gpu(), network.train_batch_size()
data = torch.Generator().manual_seed(1)
for step in range(6):
    ids, labels = torch.randint(43, (2, total, 8), generator=data)
    first = torch.distributed.get_rank() * rows % total
    for group in optimizer.param_groups:
        group["lr"] = base * warmup_linear_decay(step)
    loss = network(ids[first : first + rows], labels[first : first + rows])
    network.backward(loss)
    network.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
with deepspeed.zero.GatheredParameters([model.pooler.weight]):
    assert torch.equal(pooler, model.pooler.weight)
