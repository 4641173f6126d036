"""A tied model with a buffer and a frozen parameter: three steps, a checkpoint with a client state, three steps."""

import argparse
import os

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.hidden = nn.Linear(8, 11)
        self.norm = nn.LayerNorm(11)
        self.out = nn.Linear(11, 8)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.7]))
        self.head = nn.Linear(8, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) * self.frozen.to(self.embed.weight.dtype)
        return self.head(x + self.out(self.norm(self.hidden(x)).tanh()) * self.scale.to(x.dtype))


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
net = Net()
biases = [p for n, p in net.named_parameters() if n.endswith("bias") and p.requires_grad]
others = [p for n, p in net.named_parameters() if not n.endswith("bias") and p.requires_grad]
groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=groups)
rows, total = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
data = torch.Generator().manual_seed(1)
folder = os.environ["CHECKPOINTS"]


def train():
    ids = torch.randint(29, (total, 7), generator=data)
    first = torch.distributed.get_rank() // engine.mp_world_size * rows % total
    mine = ids[first : first + rows]
    logits = engine(mine[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), mine[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())


if os.environ.get("LOAD"):
    for _ in range(3):
        torch.randint(29, (total, 7), generator=data)
    path, client = engine.load_checkpoint(os.environ["LOAD"])
    assert client == {"epoch": 2, "seen": [1, 2]} and engine.global_steps == 3, (path, client)
else:
    for _ in range(3):
        train()
    engine.save_checkpoint(folder, client_state={"epoch": 2, "seen": [1, 2]})
    print("saved", 3)
for _ in range(3):
    train()
