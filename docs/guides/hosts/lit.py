"""Train a small decoder on the bytes of a file with Lightning; started again, it goes on where it ended."""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from engine.lightning import Strategy
from engine.models.decoder import Decoder, DecoderConfig

config, text, folder = sys.argv[1:4]
rows = torch.tensor(list(Path(text).read_bytes()))
rows = rows[: len(rows) // 33 * 33].view(-1, 33)
torch.manual_seed(0)


class LitDecoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Decoder(DecoderConfig(vocabulary=256, layers=2, width=32, heads=4, context=32))

    def loss(self, ids):
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, ids, batch_idx):
        loss = self.loss(ids)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, ids, batch_idx):
        self.log("val_loss", self.loss(ids), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


strategy = Strategy(config)
checkpoints = ModelCheckpoint(folder, "{epoch}", save_last="link", save_top_k=-1)
trainer = L.Trainer(
    strategy=strategy, devices=2, accelerator="auto", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0,
    callbacks=[checkpoints], logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
last, module, held_out = Path(folder, "last.ckpt"), LitDecoder(), DataLoader(rows[:4], 2)
trainer.fit(module, DataLoader(rows[4:], 2), held_out, ckpt_path=last if last.exists() else None)
(found,) = trainer.validate(module, held_out, verbose=False)
if trainer.is_global_zero:
    print(f"validation loss {found['val_loss']:.5f}")
trainer.save_checkpoint(Path(folder, "weights.ckpt"), weights_only=True)
