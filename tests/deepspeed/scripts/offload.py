"""State that leaves the device between two phases, in the shape of the offload_states example."""

import argparse
import json

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--nlayers", type=int, default=3)
parser.add_argument("--pin_memory", action="store_true")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
net = nn.Sequential(*(layer for _ in range(args.nlayers) for layer in (nn.Linear(16, 16), nn.Tanh())))
with open(args.deepspeed_config) as file:
    config = json.load(file)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
rows, total = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
first = torch.distributed.get_rank() * rows
data = torch.Generator().manual_seed(1)


def train():
    x, y = torch.randn(2, total, 16, generator=data)
    device = get_accelerator().current_device_name()
    loss = nn.functional.mse_loss(engine(x[first : first + rows].to(device)), y[first : first + rows].to(device))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())


for include in (None, list(OffloadStateTypeEnum), [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]):
    train()
    before = get_accelerator().memory_allocated()
    engine.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=args.pin_memory, non_blocking=False)
    get_accelerator().empty_cache()
    if get_accelerator().device_name() != "cpu":
        assert get_accelerator().memory_allocated() <= before
    engine.reload_states()
    train()
