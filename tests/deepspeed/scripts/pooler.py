"""A part that no optimizer has, and a ZeRO 3 critic whose other method is called: ``net.value(x)``."""

import argparse

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.pooler = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def trunk(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, ids):
        return self.head(self.pooler(self.trunk(ids))).squeeze(-1)

    def value(self, ids):
        return self.head(self.trunk(ids)).squeeze(-1)


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
net = Critic()
kept = [p for n, p in net.named_parameters() if "pooler" not in n]
engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=[{"params": kept}])
rows, total = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
data = torch.Generator().manual_seed(1)
assert ZeroParamStatus.NOT_AVAILABLE.name == "NOT_AVAILABLE"
for _ in range(5):
    ids = torch.randint(31, (total, 7), generator=data)
    first = torch.distributed.get_rank() * rows % total
    mine = ids[first : first + rows]
    loss = (engine.value(mine) - mine.float() / 31).square().mean() + 0.1 * engine(mine).square().mean()
    engine.backward(loss)
    grad = safe_get_full_grad(net.head.weight)
    print("grad", float(grad.norm()))
    engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
