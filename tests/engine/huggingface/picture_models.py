"""Models whose batches hold tensors without rows: patches of pictures, their grids, positions [3, rows, tokens].

Rows have no, one or two pictures of two sizes, so that no size of the example tells which tensors are rows.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engine.huggingface.counted_models import ARGUMENTS
from tests.engine.huggingface.host_runs import ENVIRONMENT
from tests.launches import Launch, Line

TOKENS, PICTURE = 24, 60
WHOLE = ("pixel_values", "image_grid_thw", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """Runs of the Trainer and of a loop of accelerate, as plain data for their processes."""

    folder: str
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the hosts alone."""
    whole: tuple[str, ...] = WHOLE
    arguments: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("qwen2 vl", "qwen2.5 vl", "positions")
    loop: bool = False
    """A loop of accelerate in place of the Trainer."""


def qwen2_vl() -> Any:
    """A Qwen2-VL of two layers and two layers of vision."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "in_channels": 3}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(**_vision_language(vision)))


def qwen2_5_vl() -> Any:
    """A Qwen2.5-VL, whose windows of patches are cut by ``cu_seqlens``."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "in_chans": 3, "window_size": 8,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**_vision_language(vision)))


def _vision_language(vision: dict[str, Any]) -> dict[str, Any]:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    common = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    ids = {"image_token_id": PICTURE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    return {"text_config": text, "vision_config": common | vision, **ids}


MODELS: Mapping[str, tuple[Callable[[], Any], bool]] = {
    "qwen2 vl": (qwen2_vl, False),
    "qwen2.5 vl": (qwen2_5_vl, False),
    "positions": (qwen2_vl, True),
}
"""Model, and whether positions [3, rows, tokens] come with its batches."""


def pictures(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows, of which each third has no picture."""
    import torch

    drawn, chance, found = torch.Generator().manual_seed(seed), random.Random(seed), []
    for row in range(count):
        ids, patches, grids, at = torch.randint(0, 50, (TOKENS,), generator=drawn), [], [], 1
        for _ in range(row % 3):
            height = chance.choice([2, 4])
            ids[at], ids[at + 1 : at + 1 + height], ids[at + 1 + height] = 62, PICTURE, 63
            at += height + 3
            patches.append(torch.randn(height * 4, 3 * 2 * 4 * 4, generator=drawn))
            grids.append([1, height, 4])
        labels = ids.clone()
        labels[:8] = -100
        found.append(
            {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == PICTURE).long()}
            | ({"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)} if patches else {})
        )
    return found


def collated(rows: list[dict[str, Any]], positions: bool) -> dict[str, Any]:
    """A batch as a processor makes it: patches of all pictures one after the other, first."""
    import torch

    batch = {
        name: torch.cat([row[name] for row in rows if name in row])
        for name in ("pixel_values", "image_grid_thw")
        if any(name in row for row in rows)
    }
    batch |= {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels", "mm_token_type_ids")}
    return batch | ({"position_ids": torch.arange(TOKENS).expand(3, len(rows), TOKENS)} if positions else {})


def train_pictured(line: Line, run: Pictured) -> None:
    """Train each model in turn; say the losses, norms and losses of evaluation, or the error."""
    for name in run.models:
        try:
            line((_looped if run.loop else _trained)(name, run))
        except Exception as error:
            line(f"{type(error).__name__}: {error}")


def _trained(name: str, run: Pictured) -> list[float]:
    import torch
    import transformers
    from transformers.trainer_callback import PrinterCallback

    torch.manual_seed(0)
    make, positions = MODELS[name]
    changes = {"remove_unused_columns": False, "per_device_train_batch_size": 2, "prediction_loss_only": True}
    given: dict[str, Any] = {
        "model": make(), "train_dataset": pictures(12, 1), "eval_dataset": pictures(5, 2),
        "args": transformers.TrainingArguments(run.folder, **(ARGUMENTS | changes | dict(run.arguments))),
        "data_collator": lambda rows: collated(rows, positions),
    }  # fmt: skip
    kind: Any = transformers.Trainer
    if run.config is not None:
        from engine.huggingface import Trainer

        kind, given = Trainer, given | {"engine_config": run.config, "whole": run.whole}
    trainer = kind(**given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if run.config is not None:
        trainer.engine.close()
    names = ("loss", "grad_norm", "eval_loss")
    return [entry[each] for entry in trainer.state.log_history for each in names if each in entry]


def _looped(name: str, run: Pictured) -> list[float]:
    import accelerate
    import torch

    torch.manual_seed(0)
    make, positions = MODELS[name]
    given: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}
    kind: Any = accelerate.Accelerator
    if run.config is not None:
        from engine.huggingface import Accelerator

        kind, given = Accelerator, given | {"engine_config": run.config, "whole": run.whole}
    accelerator, model = kind(**given), make()
    loader: Any = torch.utils.data.DataLoader(
        pictures(12, 1), 2, collate_fn=lambda rows: collated(rows, positions)  # type: ignore[arg-type]
    )  # fmt: skip
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found.append(float(loss.detach()))
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    if run.config is not None:
        accelerator.engine.close()
    return found


def run_pictured(run: Pictured, ranks: int) -> dict[str, Any]:
    """Rank 0's account of each model on so many processes."""
    with Launch(train_pictured, ranks, run, env=ENVIRONMENT) as job:
        ended = job.end(400)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return dict(zip(run.models, ended[0].said, strict=True))
