"""Direct preference optimization: a policy that is trained beside a reference engine without an optimizer."""

import argparse
import copy
import json

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.runtime.utils import set_random_seed
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
set_random_seed(0)
policy = nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 31))
with open(args.deepspeed_config) as file:
    config = json.load(file)
reference_config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
reference, none, _, _ = deepspeed.initialize(model=copy.deepcopy(policy), config=reference_config)
reference.eval()
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=policy, model_parameters=policy.parameters(), config=config
)
rows, total = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
steps = engine.gradient_accumulation_steps()
data = torch.Generator().manual_seed(1)


def log_probability(model, ids):
    logits = model(ids[:, :-1]).log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))


for _ in range(6):
    batch = torch.randint(31, (2, rows * torch.distributed.get_world_size(), 6), generator=data)
    first = torch.distributed.get_rank() * rows
    chosen, rejected = batch[:, first : first + rows].to(get_accelerator().current_device_name())
    with torch.no_grad():
        before = log_probability(reference, chosen) - log_probability(reference, rejected)
    now = log_probability(engine, chosen) - log_probability(engine, rejected)
    loss = -nn.functional.logsigmoid(0.1 * (now - before)).mean()
    engine.backward(loss)
    engine.step()
    engine.tput_timer.update_epoch_count()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
    print("rate", scheduler.get_last_lr()[0])
