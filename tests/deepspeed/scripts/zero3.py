"""A model built under zero.Init, a weight written on one rank, and a checkpoint with a client state."""

import argparse
import os

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    net = nn.Sequential(nn.Embedding(61, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 61))
with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
    if torch.distributed.get_rank() == 0:
        generator = torch.Generator().manual_seed(5)
        for parameter in net.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
rows, total = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
data = torch.Generator().manual_seed(1)
folder = os.environ["CHECKPOINTS"]


def train(step):
    ids = torch.randint(61, (total, 9), generator=data)
    first = torch.distributed.get_rank() * rows % total
    mine = ids[first : first + rows]
    logits = engine(mine[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())


for step in range(3):
    train(step)
with deepspeed.zero.GatheredParameters(net[1].weight):
    print("sum", float(net[1].weight.abs().sum()))
engine.save_checkpoint(folder, client_state={"step": 3})
place = data.get_state()
train(3)
data.set_state(place)
path, client = engine.load_checkpoint(folder)
print("step", client["step"])
for step in range(3, 6):
    train(step)
