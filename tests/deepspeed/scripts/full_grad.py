"""Gradients, weights and optimizer state of single parameters, between backward and step."""

import argparse

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
rows, total = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
data = torch.Generator().manual_seed(1)
for _ in range(4):
    batch = torch.randn(total, 8, generator=data)
    first = torch.distributed.get_rank() * rows % total
    loss = engine(batch[first : first + rows]).square().mean()
    engine.backward(loss)
    for parameter in net.parameters():
        print("grad", float(safe_get_full_grad(parameter).norm()))
    engine.step()
    for parameter in net.parameters():
        print("weight", float(safe_get_full_fp32_param(parameter).norm()))
        print("moment", float(safe_get_full_optimizer_state(parameter, "exp_avg").norm()))
for parameter in net.parameters():
    safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5)
    print("weight", float(safe_get_full_fp32_param(parameter).norm()))
