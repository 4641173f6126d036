"""Fine-tuning of a BERT with groups of its own optimizer and a scheduler over it."""

import argparse

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from transformers import BertConfig, BertForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
)
no_decay = ["bias", "LayerNorm.weight"]
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
scheduler = WarmupDecayLR(optimizer, total_num_steps=8, warmup_max_lr=1e-3, warmup_num_steps=3, warmup_type="linear")
model, optimizer, _, scheduler = deepspeed.initialize(
    args=args, model=model, optimizer=optimizer, lr_scheduler=scheduler
)
rows, total = model.train_micro_batch_size_per_gpu(), model.train_batch_size()
data = torch.Generator().manual_seed(1)
model.train()
for _ in range(6):
    ids = torch.randint(61, (total, 12), generator=data)
    labels = torch.randint(3, (total,), generator=data)
    first = torch.distributed.get_rank() * rows % total
    loss = model(input_ids=ids[first : first + rows], labels=labels[first : first + rows]).loss
    model.backward(loss)
    model.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
    print("rate", optimizer.param_groups[0]["lr"])
