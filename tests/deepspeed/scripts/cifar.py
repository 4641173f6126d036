"""Image classification with the three calls: arguments, training data, a scheduler, accumulation."""

import argparse

import deepspeed
import torch
from torch import nn


class Images(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(64, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (64,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pixels[index], self.labels[index]


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))
parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
model_engine, optimizer, loader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=Images()
)
criterion = nn.CrossEntropyLoss()
for _ in range(2):
    for pixels, labels in loader:
        outputs = model_engine(pixels.to(model_engine.device))
        loss = criterion(outputs, labels.to(model_engine.device))
        model_engine.backward(loss)
        model_engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        print("loss", float(mean) / torch.distributed.get_world_size())
