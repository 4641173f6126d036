"""Masked language modelling in the shape of HelloDeepSpeed: its own configuration, a checkpoint, and a second start."""

import argparse
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "-1")))
args, _ = parser.parse_known_args()
ds_config = {
    "train_micro_batch_size_per_gpu": 8 // int(os.environ["WORLD_SIZE"]),
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "fp16": {"enabled": bool(get_accelerator().is_fp16_supported())},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(53, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 53)

    def forward(self, src_tokens, attention_mask, tgt_tokens):
        hidden = self.encoder(self.embed(src_tokens), src_key_padding_mask=attention_mask == 0)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tgt_tokens.flatten(), ignore_index=1)


def batches(rank, rows):
    data = torch.Generator().manual_seed(3)
    while True:
        ids = torch.randint(2, 53, (8, 10), generator=data)
        masked = torch.zeros(8, 10, dtype=torch.bool)
        masked[:, ::3] = True  # as many in each row, so that a mean of means is the mean
        batch = {
            "src_tokens": ids.masked_fill(masked, 0),
            "attention_mask": torch.ones_like(ids),
            "tgt_tokens": ids.masked_fill(~masked, 1),
        }
        yield {name: value[rank * rows : rank * rows + rows] for name, value in batch.items()}


deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
device = torch.device(get_accelerator().device_name(args.local_rank))
torch.manual_seed(0)
model = Masked().to(device)
model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
model.train()
given = batches(torch.distributed.get_rank(), model.train_micro_batch_size_per_gpu())
losses = []
for step in range(6):
    batch = {key: value.to(device) for key, value in next(given).items()}
    loss = model(**batch)
    model.backward(loss)
    model.step()
    losses.append(loss.item())
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
    if step == 2:
        model.save_checkpoint(save_dir=os.environ["CHECKPOINTS"], client_state={"checkpoint_step": step})
_, client_state = model.load_checkpoint(load_dir=os.environ["CHECKPOINTS"])
print("step", client_state["checkpoint_step"])
