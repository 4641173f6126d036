"""Runs of Lightning's Trainer, alone or over the engine, as jobs of a launcher's processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import models
from tests.launches import Launch, Line

ENVIRONMENT = {"TRINE_QUIET": "1", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
ROWS = 28
"""Rows of training: microbatches of 4 and steps of 2, of which the last of an epoch has one."""


@dataclass(frozen=True, kw_only=True)
class LitCase:
    """A run, as plain data for its processes."""

    folder: str
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the host alone."""
    rows: int = 4
    """Of a data rank in a microbatch."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Beside those of every run."""
    resume: str | None = None
    own_clipping: float = 0.0
    """``configure_gradient_clipping`` clips to it."""
    hook: str | None = None
    """The hook that looks at gradients on their parameters: Lightning's ``grad_norm`` of the module."""
    halves: bool = False
    """``on_before_optimizer_step`` halves the gradients, on the engine by ``eng.gradients``."""
    test: str | None = None
    """A checkpoint that is tested, without a fit."""


@dataclass(frozen=True, kw_only=True)
class Lit:
    """What a rank says of a run."""

    losses: list[float]
    """Of each microbatch, over data ranks."""
    rates: list[float]
    validated: list[float]
    """Loss of validation after each epoch, and that of ``test`` at the end."""
    gathered: list[float]
    """What ``all_gather`` and a sum over ranks give of ones."""
    files: list[str]
    steps: int
    again: str = ""
    """The engine's step that the second checkpoint of one name names."""


def lit_module(case: LitCase) -> Any:
    """A LightningModule around the small decoder, which keeps what it has seen."""
    import lightning as L
    import torch
    from torch.nn import functional as F

    class LitDecoder(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = models.decoder()
            self.seen: dict[str, list[float]] = {"losses": [], "rates": [], "validated": [], "gathered": []}

        def loss(self, ids: Any) -> Any:
            return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

        def training_step(self, ids: Any, batch_idx: int) -> Any:
            loss = self.loss(ids)
            self.log("train_loss", loss)
            self.seen["losses"].append(float(self.trainer.strategy.reduce(loss.detach())))
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen["rates"].append(self.optimizers().param_groups[0]["lr"])

        def validation_step(self, ids: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(ids), sync_dist=True)

        def test_step(self, ids: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(ids), sync_dist=True)
            ones = torch.ones(1)
            self.seen["gathered"] = [*self.all_gather(ones).flatten().tolist()]
            strategy, first = self.trainer.strategy, bool(self.trainer.is_global_zero)
            self.seen["gathered"].append(float(strategy.reduce(ones, reduce_op="sum")))
            self.seen["gathered"] += [strategy.reduce_boolean_decision(True, all=each) for each in (False, True)]
            self.seen["gathered"].append(strategy.reduce_boolean_decision(first, all=False))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.seen["validated"].append(float(self.trainer.callback_metrics["val_loss"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Clipping(LitDecoder):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=case.own_clipping, gradient_clip_algorithm="norm")

    class Halving(LitDecoder):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if case.config is None:
                for gradient in (parameter.grad for parameter in self.model.parameters()):
                    assert gradient is not None
                    gradient.mul_(0.5)
                return
            with self.trainer.strategy.engine.gradients() as gradients:
                for gradient in gradients.values():
                    gradient.mul_(0.5)

    if case.hook is not None:
        return _looking(LitDecoder, case.hook)()
    return Clipping() if case.own_clipping else Halving() if case.halves else LitDecoder()


def _looking(kind: Any, hook: str) -> Any:
    """A LightningModule whose ``hook`` looks for the norms of all gradients."""
    from lightning.pytorch.utilities import grad_norm

    def look(self: Any, *_: Any, **__: Any) -> None:
        assert grad_norm(self, norm_type=2), "no gradient, and no word"

    return type("Looking", (kind,), {hook: look})


def lit(line: Line, case: LitCase) -> None:
    """Fit, test, save weights; say what was seen."""
    import os

    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    strategy: Any = "ddp"  # on one process too, since Lightning then shuffles the rows of training as for the engine
    if case.config is not None:
        from engine.lightning import Strategy

        strategy = Strategy(case.config)
    checkpoints: Any = ModelCheckpoint(case.folder, "{epoch}", save_top_k=-1, save_last="link")
    arguments: dict[str, Any] = {"gradient_clip_val": 0.5} if not case.own_clipping else {}
    trainer: Any = L.Trainer(
        strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), accelerator="cpu", max_epochs=2,
        accumulate_grad_batches=2, callbacks=[checkpoints], logger=False, enable_progress_bar=False,
        enable_model_summary=False, **(arguments | dict(case.arguments)),
    )  # fmt: skip
    ids = torch.cat(models.token_batches(ROWS + 8, 1))[:, : models.LENGTH]
    train: Any = DataLoader(ids[:ROWS], case.rows)  # type: ignore[arg-type]
    held_out: Any = DataLoader(ids[ROWS:], case.rows)  # type: ignore[arg-type]
    module = lit_module(case)
    if case.test is not None:
        line(trainer.test(module, held_out, ckpt_path=case.test, verbose=False)[0]["test_loss"])
        return
    if case.hook is not None:
        try:
            trainer.fit(module, train)
        except Exception as error:
            line(f"{type(error).__name__}: {error}")
        return
    trainer.fit(module, train, held_out, ckpt_path=case.resume)
    steps = int(trainer.global_step)
    trainer.save_checkpoint(Path(case.folder, "weights.ckpt"), weights_only=True)
    again = Path(case.folder, "again.ckpt")
    for _ in range(2):
        trainer.save_checkpoint(again)
    named = ""
    if case.config is not None:
        named = str(torch.load(again / "lightning.ckpt", weights_only=False)["trine_engine_step"])
    module.seen["validated"].append(trainer.test(module, held_out, verbose=False)[0]["test_loss"])
    folder = Path(case.folder)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    line(Lit(**module.seen, files=files, steps=steps, again=named))


def run_lit(case: LitCase, ranks: int) -> Any:
    """Rank 0's account: a :class:`Lit`, or the loss of a test."""
    with Launch(lit, ranks, case, env=ENVIRONMENT) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    first, *others = (end.said[0] for end in ended)
    assert case.test is not None or all(other.losses == first.losses for other in others)
    return first


def errors_of(case: LitCase, ranks: int) -> list[str]:
    """What each rank is told of a hook that looks for gradients."""
    with Launch(lit, ranks, case, env=ENVIRONMENT) as job:
        ended = job.end(240)
    return [str(end.said[0]) if end.said else end.error for end in ended]


def read_weights(line: Line, folder: str) -> None:
    """Say the loss of the test rows with a file of weights, as Lightning alone loads it."""
    import torch

    case = LitCase(folder=folder)
    module = type(lit_module(case)).load_from_checkpoint(Path(folder, "weights.ckpt"))
    ids = torch.cat(models.token_batches(ROWS + 8, 1))[ROWS:, : models.LENGTH]
    with torch.no_grad():
        line(float(module.eval().loss(ids)))


def loss_of_weights(folder: Path) -> float:
    """The loss that Lightning alone finds with the weights that a run has saved."""
    with Launch(read_weights, 1, str(folder), env=ENVIRONMENT) as job:
        (ended,) = job.end(120)
    assert ended.code == 0, ended.error
    return float(ended.said[0])
