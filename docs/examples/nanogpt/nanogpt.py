"""Train a small GPT on the bytes of a folder's .py and .md files; started again, it goes on where it ended."""

import sys
from pathlib import Path

import torch
from torch import nn

import engine
from engine.data import Batches, Sampler, window_count
from engine.data.corpus import text_corpus

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


config, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".md")]
with engine.initialize(GPT, config) as eng:

    def batches(split):  # this data rank's rows of an endless, shuffled stream
        text, place = text_corpus(files, split), (eng.grid.coord().dp, eng.grid.dp)
        windows = window_count(len(text.tokens), CONTEXT)
        return Batches(text, CONTEXT, Sampler(windows, eng.config.train_batch_size, 0, *place))

    train, validation = batches("train"), batches("validation")
    eng.register_for_checkpointing(data=train)
    eng.load_checkpoint(missing_ok=True)
    while eng.step_count < steps:
        report = eng.train_batch(next(train))
        if eng.grid.rank == 0:
            print(f"step {report.step} loss {report.loss:.6f}")
    loss = sum(eng.eval_batch(next(validation)).loss for _ in range(8)) / 8
    if eng.grid.rank == 0:
        print(f"validation loss {loss:.6f}")
