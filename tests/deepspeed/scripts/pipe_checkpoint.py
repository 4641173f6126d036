"""A pipeline of two stages with ZeRO 1: three steps, a checkpoint, three more steps."""

import argparse
import os

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)


def project(layer, x):
    return nn.functional.linear(x, layer.weight)


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


layers = [
    TiedLayerSpec("embed", nn.Embedding, 29, 8),
    nn.Linear(8, 11),
    torch.tanh,
    LayerSpec(nn.Linear, 11, 8),
    LayerSpec(nn.LayerNorm, 8),
    TiedLayerSpec("embed", nn.Embedding, 29, 8, forward_fn=project),
]
net = PipelineModule(layers=layers, loss_fn=loss_fn, num_stages=2, partition_method="uniform")
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
data = torch.Generator().manual_seed(1)
folder = os.environ["CHECKPOINTS"]
rows = engine.train_micro_batch_size_per_gpu()


def train():
    def batches():
        for _ in range(engine.gradient_accumulation_steps()):
            ids = torch.randint(29, (rows, 7), generator=data)
            yield ids[:, :-1], ids[:, 1:]

    print("loss", float(engine.train_batch(data_iter=batches())))


if os.environ.get("LOAD"):
    for _ in range(3 * engine.gradient_accumulation_steps()):
        torch.randint(29, (rows, 7), generator=data)
    path, client = engine.load_checkpoint(os.environ["LOAD"])
    assert client == {"epoch": 2} and engine.global_steps == 3, (path, client)
else:
    for _ in range(3):
        train()
    engine.save_checkpoint(folder, client_state={"epoch": 2})
    print("saved", 3)
for _ in range(3):
    train()
