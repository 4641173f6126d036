"""A U-shaped network that finds discs in noisy pictures: skip connections, two outputs, a loss of one's own."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import engine

SIZE, STEPS = 16, 20


def convolution(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.GELU())


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down1, self.down2 = convolution(1, width), convolution(width, 2 * width)
        self.middle = convolution(2 * width, 2 * width)
        self.up2, self.up1 = convolution(4 * width, width), convolution(2 * width, width)
        self.mask, self.clean = nn.Conv2d(width, 1, 1), nn.Conv2d(width, 1, 1)

    def forward(self, picture):
        fine = self.down1(picture)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.middle(F.max_pool2d(coarse, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), coarse], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), fine], dim=1))
        return {"mask": self.mask(x), "clean": self.clean(x)}


def loss_fn(output, batch):
    mask = F.binary_cross_entropy_with_logits(output["mask"], batch["disc"])
    return mask + F.mse_loss(output["clean"], batch["disc"])


def discs(step, rows):
    """Pictures of the whole batch of a step, the same on every rank."""
    random = torch.Generator().manual_seed(step)
    x, y, radius = torch.rand(3, rows, 1, 1, 1, generator=random) * SIZE
    along = torch.arange(SIZE)
    disc = ((along - x) ** 2 + (along.view(-1, 1) - y) ** 2 < (2 + radius / 3) ** 2).float()
    return {"picture": disc + torch.randn(disc.shape, generator=random), "disc": disc}


with engine.initialize(UNet, sys.argv[1], loss_fn=loss_fn) as eng:
    for step in range(STEPS):
        batch = discs(step, eng.config.train_batch_size)
        mine = {name: rows.chunk(eng.grid.dp)[eng.grid.coord().dp] for name, rows in batch.items()}
        report = eng.train_batch(mine)
        if eng.grid.rank == 0:
            print(f"step {report.step} loss {report.loss:.6f}")
    weights = eng.full_state_dict()
    if eng.grid.rank == 0:
        torch.save(weights, "unet.pt")
