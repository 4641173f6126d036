"""Scripts of users for ``trine verify train.py``, as text."""

HEAD = """
import sys
import torch
from torch import nn
import engine

config = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "parallel": {"data": 2, "tensor": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1},
}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
rows = torch.randn(8, 8), torch.randn(8, 8)

def distance(output, batch):
    return nn.functional.mse_loss(output, batch[1])

"""
TRAINS = (
    HEAD
    + """
eng = engine.initialize(model, config, loss_fn=distance)
print("rank", eng.grid.coord().dp)
for _ in range(int(sys.argv[1])):
    report = eng.train_batch(rows)
    open("trained", "w").close()
"""
)
LOOP = (
    HEAD
    + """
with engine.initialize(model, config, distance, example_batch=rows) as eng:
    eng.backward(eng(rows))
"""
)
TWICE = (
    HEAD
    + """
teacher = engine.initialize(model, config, loss_fn=distance, example_batch=rows)
student = engine.initialize(nn.Linear(8, 8), config, loss_fn=distance)
student.train_batch(rows)
"""
)
NEVER = HEAD + "print('hello')\n"
FAILS = "import engine\nraise ValueError('no data here')\n"
LATER = HEAD + "engine.initialize(model, config, loss_fn=distance)\nraise KeyError('rank')\n"
EXITS = HEAD + "sys.exit(2)\n"
WITHOUT_ROWS = HEAD + "engine.initialize(model, config, loss_fn=distance).save_checkpoint('x')\n"
HUGGING_FACE = """
import torch, transformers
import engine
sizes = {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 500, "n_positions": 128}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
config = {"train_batch_size": 4, "parallel": {"data": 1, "tensor": 2, "pipeline": 1},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
eng = engine.initialize(model, config)
ids = torch.randint(500, (4, 64))
eng.train_batch({"input_ids": ids, "labels": ids})
"""
