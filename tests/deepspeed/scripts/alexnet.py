"""A convolutional network as a list of layers on a pipeline."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Images(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(48, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (48,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pixels[index], self.labels[index]


def flatten(x):
    return x.view(x.size(0), -1)


deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
layers = [
    LayerSpec(nn.Conv2d, 3, 8, 3, padding=1),
    nn.ReLU(inplace=True),
    LayerSpec(nn.MaxPool2d, 2),
    flatten,
    LayerSpec(nn.Linear, 128, 64),
    nn.ReLU(inplace=True),
    LayerSpec(nn.Linear, 64, 10),
]
net = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="parameters")
for parameter in net.parameters():  # a rank of DeepSpeed builds its own layers only
    generator = torch.Generator().manual_seed(parameter.numel())
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
loader = torch.utils.data.DataLoader(Images(), batch_size=engine.train_micro_batch_size_per_gpu())
items = iter(RepeatingLoader(loader))
for _ in range(6):
    print("loss", float(engine.train_batch(data_iter=items)))
