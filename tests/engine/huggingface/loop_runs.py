"""Loops written for accelerate, alone or over the engine, as jobs of a launcher's processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.huggingface.host_runs import ENVIRONMENT, dataset, small_model
from tests.launches import Launch, Line

STEPS = 8
"""Updates of a run: 28 rows in microbatches of 4 and steps of 2, of which the last of an epoch has one, twice."""


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """A run, as plain data for its processes."""

    folder: str
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the host alone."""
    rows: int = 4
    """Of a data rank in a microbatch."""
    own_loss: bool = False
    """From logits, in place of the model's."""
    precision: str = "no"
    shuffle: bool = False
    resume: str | None = None
    """A folder of ``save_state`` after the first epoch."""
    falls_over: int | None = None
    """Updates over which the rate falls to zero; None: it rises in the first ones."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the accelerator."""


@dataclass(frozen=True, kw_only=True)
class Looped:
    """What a rank says of a run."""

    losses: list[float]
    """Of each microbatch, over data ranks."""
    norms: list[float]
    rates: list[float]
    evaluations: list[tuple[int, float]]
    """Rows that were gathered, and the sum of their losses, after each epoch."""
    names: list[list[str]]
    """Names of the rows that were gathered, as objects."""
    files: list[str]


def loss_of(model: Any, batch: Mapping[str, Any], own: bool) -> Any:
    """The loss of a microbatch: the model's, or cross-entropy of its logits."""
    from torch.nn import functional as F

    if not own:
        return model(**batch).loss
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def make_accelerator(case: LoopCase) -> Any:
    """The host's accelerator, or the engine's."""
    given = {"cpu": True, "gradient_accumulation_steps": 2, "mixed_precision": case.precision, **case.given}
    if case.config is None:
        import accelerate

        return accelerate.Accelerator(**given)
    from engine.huggingface import Accelerator

    return Accelerator(engine_config=case.config, **given)


def loop(line: Line, case: LoopCase) -> None:
    """Train two epochs, or the second one alone; say what was seen."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    torch.manual_seed(7)
    accelerator = make_accelerator(case)
    model: Any = small_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    length = (case.falls_over or 0) * accelerator.num_processes
    factor = (lambda step: 1 - step / length) if length else (lambda step: min(1.0, (step + 1) / 4))
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    collate: Any = default_data_collator
    drawn = torch.Generator().manual_seed(3)
    data: Any = dataset(28, 1)
    loader: Any = DataLoader(data, case.rows, shuffle=case.shuffle, collate_fn=collate, generator=drawn)
    held_out: Any = dataset(10, 2)
    evaluation: Any = DataLoader(held_out, case.rows, collate_fn=collate)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    evaluation = accelerator.prepare(evaluation)
    if case.resume is not None:
        accelerator.load_state(case.resume)
    seen = Looped(losses=[], norms=[], rates=[], evaluations=[], names=[], files=[])
    for epoch in range(0 if case.resume is None else 1, 2):
        loader.set_epoch(epoch)
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch, case.own_loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            seen.rates.append(schedule.get_last_lr()[0])
        evaluate(accelerator, model, evaluation, seen)
        accelerator.save_state(f"{case.folder}/epoch-{epoch}")
    export(accelerator, model, case.folder)
    accelerator.wait_for_everyone()
    folder = Path(case.folder)
    seen.files.extend(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    accelerator.end_training()
    line(seen)


def evaluate(accelerator: Any, model: Any, loader: Any, seen: Looped) -> None:
    """Gather the loss of every row, and names of the rows as objects."""
    import torch
    from torch.nn import functional as F

    model.eval()
    losses, names = [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        each = F.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none"
        )
        losses.append(accelerator.gather_for_metrics(each.sum(1)))
        names += accelerator.gather_for_metrics([str(row.tolist()) for row in batch["input_ids"]])
    every = torch.cat(losses)
    seen.evaluations.append((len(every), float(every.sum())))
    seen.names.append(names)


def export(accelerator: Any, model: Any, folder: str) -> None:
    """The model as accelerate's pages save it: for ``from_pretrained``, and by ``save_model``."""
    whole = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    whole.save_pretrained(
        f"{folder}/pretrained", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=state,
    )  # fmt: skip
    accelerator.save_model(model, f"{folder}/weights")


def run_loop(case: LoopCase, ranks: int) -> Looped:
    """Rank 0's account, which is that of all."""
    with Launch(loop, ranks, case, env=ENVIRONMENT) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    first: Looped = ended[0].said[0]
    for end in ended[1:]:
        assert (end.said[0].losses, end.said[0].evaluations) == (first.losses, first.evaluations)
    return first


def read_weights(line: Line, folder: str) -> None:
    """Say the sum of the losses of ``evaluate`` as transformers computes it, of both folders of ``export``."""
    import torch
    from accelerate import load_checkpoint_in_model
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM

    other: Any = small_model()
    load_checkpoint_in_model(other, f"{folder}/weights")
    loaded: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/pretrained")
    rows = dataset(10, 2)
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    for model in (other, loaded):
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits
        line(float(F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="sum")))


def loss_of_folder(folder: Path) -> list[float]:
    """Sums of losses of the two exports in a folder of a run."""
    with Launch(read_weights, 1, str(folder), env=ENVIRONMENT) as job:
        (ended,) = job.end(120)
    assert ended.code == 0, ended.error
    return ended.said
