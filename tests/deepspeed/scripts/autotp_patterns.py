"""Tensor parallelism with patterns of one's own, in the shape of the AutoTP examples."""

import argparse
import json

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.expand, self.shrink = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.shrink(torch.relu(self.expand(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 29)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


deepspeed.init_distributed()
torch.manual_seed(0)
net = Model()
with open(args.deepspeed_config) as file:
    config = json.load(file)
config["tensor_parallel"] = {
    "autotp_size": torch.distributed.get_world_size(),
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.expand\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.shrink\.weight$"], "partition_type": "row"},
        ],
    },
}
engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
data = torch.Generator().manual_seed(1)
for _ in range(5):
    ids = torch.randint(29, (engine.train_micro_batch_size_per_gpu(), 9), generator=data).to(engine.device)
    logits = engine(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    print("loss", float(loss))
