"""A reward model on pairs, in the shape of step 2 of DeepSpeed-Chat: groups of parameters, FusedAdam, a schedule."""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--offload", action="store_true")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(41, 16)
        self.mix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.v_head = nn.Linear(16, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.norm(self.mix(self.embed(input_ids)).tanh() * attention_mask[..., None])
        rewards = self.v_head(hidden.cumsum(1)).squeeze(-1)
        chosen, rejected = rewards.chunk(2)
        loss = -nn.functional.logsigmoid(chosen[:, 2:] - rejected[:, 2:]).mean()
        return {"loss": loss, "chosen_mean_scores": chosen[:, -1], "rejected_mean_scores": rejected[:, -1]}


def get_optimizer_grouped_parameters(model, weight_decay, no_decay=("bias", "norm.weight")):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not any(word in n for word in no_decay)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if any(word in n for word in no_decay)], "weight_decay": 0.0},
    ]


deepspeed.init_distributed()
args.global_rank = torch.distributed.get_rank()
with open(args.deepspeed_config) as file:
    ds_config = json.load(file)
args.deepspeed_config = None
torch.manual_seed(0)
torch.distributed.barrier()
rm_model = RewardModel()
AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
optimizer = AdamOptimizer(get_optimizer_grouped_parameters(rm_model, 0.1), lr=5e-3, betas=(0.9, 0.95))
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
rm_model, optimizer, _, lr_scheduler = deepspeed.initialize(
    model=rm_model, optimizer=optimizer, args=args, config=ds_config, lr_scheduler=lr_scheduler,
    dist_init_required=True,
)  # fmt: skip
device = get_accelerator().current_device_name()
rows, total = rm_model.train_micro_batch_size_per_gpu(), rm_model.train_batch_size()
data = torch.Generator().manual_seed(1)


def pairs():
    both = torch.randint(41, (2, total, 8), generator=data)[:, args.global_rank * rows :][:, :rows].reshape(-1, 8)
    return {"input_ids": both.to(device), "attention_mask": torch.ones_like(both).to(device)}


for _ in range(5):
    outputs = rm_model(**pairs())
    loss = outputs["loss"]
    rm_model.backward(loss)
    rm_model.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
    print("rate", lr_scheduler.get_last_lr()[0])
rm_model.tput_timer.update_epoch_count()
rm_model.eval()
with torch.no_grad():
    outputs = rm_model(**pairs())
    score = (outputs["chosen_mean_scores"] - outputs["rejected_mean_scores"]).mean().float()
torch.distributed.all_reduce(score)
print("sum", float(score) / torch.distributed.get_world_size())
if args.global_rank == 0 and ds_config["zero_optimization"]["stage"] < 3:
    os.makedirs(os.environ["CHECKPOINTS"], exist_ok=True)
    torch.save(rm_model.module.state_dict(), os.path.join(os.environ["CHECKPOINTS"], "pytorch_model.bin"))
