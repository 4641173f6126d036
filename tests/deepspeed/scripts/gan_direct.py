"""A GAN as DeepSpeed's example has it: the networks are called themselves, and engines run backward and step."""

import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
device = torch.device(get_accelerator().device_name(), 0)
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
engine_d, _, _, _ = deepspeed.initialize(args=args, model=discriminator, model_parameters=discriminator.parameters())
engine_g, _, _, _ = deepspeed.initialize(args=args, model=generator, model_parameters=generator.parameters())
criterion = nn.BCEWithLogitsLoss()
rows, total = engine_g.train_micro_batch_size_per_gpu(), engine_g.train_batch_size()
data = torch.Generator().manual_seed(1)
for _ in range(5):
    batch = torch.randn(total, 12, generator=data)
    first = torch.distributed.get_rank() * rows % total
    noise, real = batch[first : first + rows, :4].to(device), batch[first : first + rows, 4:].to(device)
    ones, zeros = torch.ones(rows, 1, device=device), torch.zeros(rows, 1, device=device)

    discriminator.zero_grad()
    error_real = criterion(discriminator(real), ones)
    engine_d.backward(error_real)
    fake = generator(noise)
    error_fake = criterion(discriminator(fake.detach()), zeros)
    engine_d.backward(error_fake)
    engine_d.step()

    generator.zero_grad()
    error = criterion(discriminator(fake), ones)
    engine_g.backward(error)
    engine_g.step()

    for loss in (error_real, error_fake, error):
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        print("loss", float(mean) / torch.distributed.get_world_size())
