"""A small network learns which half of a row has the larger sum; written for DeepSpeed, moved over."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import engine

inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
labels = (inputs[:, :8].sum(1) > inputs[:, 8:].sum(1)).long()
dataset = TensorDataset(inputs, labels)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
model = engine.initialize(net, sys.argv[1])

sampler = DistributedSampler(dataset, model.grid.dp, model.grid.coord().dp)
loader = DataLoader(dataset, batch_size=model.config.micro, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        inputs, labels = inputs.to(model.device), labels.to(model.device)
        loss = F.cross_entropy(model(inputs), labels)
        model.backward(loss)
        report = model.step()
        if report and model.grid.rank == 0:
            print(f"step {report.step} loss {report.loss:.6f}")
model.save_checkpoint("runs/signs").wait()
