"""Supervised fine-tuning at ZeRO 3 in the shape of step 1 of DeepSpeed-Chat, with its way of saving the weights."""

import argparse
import json
import math
import os

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.lm_head = nn.Linear(16, 37, bias=False)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).cumsum(1) / input_ids.shape[1]
        return nn.functional.cross_entropy(self.lm_head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def parameters_to_fetch(parameters):
    return [p for p in parameters if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def save_zero_three_model(model, global_rank, folder, zero_stage):
    model_to_save = model.module if hasattr(model, "module") else model
    os.makedirs(folder, exist_ok=True)
    state = {}
    for name, parameter in model_to_save.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters(parameters_to_fetch([parameter]), enabled=zero_stage == 3):
                whole = parameter.data.cpu()
        else:
            whole = parameter.cpu()
        if global_rank == 0:
            state[name] = whole
    if global_rank == 0:
        torch.save(state, os.path.join(folder, "pytorch_model.bin"))
        print("saved", float(sum(value.double().square().sum() for value in state.values())))


deepspeed.init_distributed()
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
with open(args.deepspeed_config) as file:
    ds_config = json.load(file)
args.deepspeed_config = None
torch.manual_seed(0)
net = Decoder()
optimizer = FusedAdam(net.parameters(), lr=5e-3, betas=(0.9, 0.95))
model, optimizer, _, _ = deepspeed.initialize(
    model=net, optimizer=optimizer, args=args, config=ds_config, dist_init_required=True
)
device = get_accelerator().current_device_name()
rows, total = model.train_micro_batch_size_per_gpu(), model.train_batch_size()
data = torch.Generator().manual_seed(1)


def batch():
    ids = torch.randint(37, (total, 9), generator=data)[rank * rows : rank * rows + rows].to(device)
    return {"input_ids": ids, "labels": ids}


def evaluation():
    model.eval()
    with torch.no_grad():
        loss = model(**batch()).float()
    model.train()
    torch.distributed.all_reduce(loss)
    return float(loss) / world


print("sum", math.exp(evaluation()))
for _ in range(5):
    loss = model(**batch())
    model.backward(loss)
    model.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / world)
model.tput_timer.update_epoch_count()
print("sum", math.exp(evaluation()))
save_zero_three_model(model, rank, os.environ["CHECKPOINTS"], zero_stage=ds_config["zero_optimization"]["stage"])
