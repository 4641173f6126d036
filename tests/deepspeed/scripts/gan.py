"""A GAN: two engines, and a loss of one that goes through the other."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
model_g, _, _, _ = deepspeed.initialize(args=args, model=generator, model_parameters=generator.parameters())
model_d, _, _, _ = deepspeed.initialize(args=args, model=discriminator, model_parameters=discriminator.parameters())
criterion = nn.BCEWithLogitsLoss()
rows = model_g.train_micro_batch_size_per_gpu()
total = model_g.train_batch_size()
data = torch.Generator().manual_seed(1)
for _ in range(6):
    batch = torch.randn(total, 12, generator=data)
    first = torch.distributed.get_rank() * rows % total
    noise, real = batch[first : first + rows, :4], batch[first : first + rows, 4:]
    ones, zeros = torch.ones(rows, 1), torch.zeros(rows, 1)

    model_d.zero_grad()
    fake = model_g(noise)
    error_real = criterion(model_d(real), ones)
    error_fake = criterion(model_d(fake.detach()), zeros)
    model_d.backward(error_real + error_fake)
    model_d.step()

    model_g.zero_grad()
    error = criterion(model_d(fake), ones)
    model_g.backward(error)
    model_g.step()

    for loss in (error_real, error_fake, error):
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        print("loss", float(mean) / torch.distributed.get_world_size())
