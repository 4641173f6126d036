"""Models whose batches hold tensors without rows: patches of pictures, their grids, positions [3, rows, tokens].

Rows have no, one or two pictures of two sizes, so that no size of the example tells which tensors are rows.
"""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.engine.huggingface.counted_models import ARGUMENTS
from tests.engine.huggingface.host_runs import ENVIRONMENT
from tests.launches import Launch, Line

TOKENS, PICTURE, TOKENS_OF_A_PICTURE = 24, 60, 4
WHOLE = ("pixel_values", "image_grid_thw", "position_ids")
PATCHES = ("qwen2 vl", "qwen2.5 vl", "positions")
"""Models of patches of pictures."""
PICTURES = ("llava", "gemma 3", "idefics 3", "smolvlm")
"""Models of pictures of one size."""
APART = PICTURES[2:]
"""Models whose pictures are in rows of their own, and need no name."""


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """Runs of the Trainer and of a loop of accelerate, as plain data for their processes."""

    folder: str
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the hosts alone."""
    whole: tuple[str, ...] = WHOLE
    arguments: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = PATCHES
    loop: str = "trainer"
    """The Trainer, "accelerator" or "lightning"."""


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


_SIGHT: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
     "patch_size": 4}
)  # fmt: skip
_TEXT: Mapping[str, Any] = MappingProxyType(
    {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
)  # fmt: skip


def llava() -> Any:
    """A LLaVA: CLIP beside a Llama, four tokens a picture."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**_SIGHT, projection_dim=32)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=LlamaConfig(**_TEXT),
            image_token_index=PICTURE,
            image_seq_length=TOKENS_OF_A_PICTURE,
        )
    )


def gemma3() -> Any:
    """A Gemma 3 with a SigLIP, whose pictures are pooled to four tokens."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    text = Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=16)
    vision = SiglipVisionConfig(**_SIGHT, vision_use_head=False)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=TOKENS_OF_A_PICTURE, image_token_index=PICTURE
        )
    )


def idefics3() -> Any:
    """An Idefics 3, whose pictures are in rows of their own and shuffled to one token."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    config = Idefics3Config(
        vision_config=dict(_SIGHT), text_config=LlamaConfig(**_TEXT), scale_factor=1, image_token_id=PICTURE
    )
    return Idefics3ForConditionalGeneration(config)


def smolvlm() -> Any:
    """A SmolVLM, as Idefics 3."""
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        vision_config=dict(_SIGHT), text_config=LlamaConfig(**_TEXT), scale_factor=1, image_token_id=PICTURE
    )
    return SmolVLMForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], Any]] = MappingProxyType({
    "qwen2 vl": qwen2_vl, "qwen2.5 vl": qwen2_5_vl, "positions": qwen2_vl, "llava": llava, "gemma 3": gemma3,
    "idefics 3": idefics3, "smolvlm": smolvlm,
})  # fmt: skip


def rows_of(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows for a model."""
    return pictures(count, seed) if name in PATCHES else of_one_size(count, seed)


def of_one_size(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a picture [3, 8, 8] each."""
    import torch

    drawn, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = torch.randint(1, 50, (TOKENS,), generator=drawn)
        ids[2 : 2 + TOKENS_OF_A_PICTURE] = PICTURE
        labels = ids.clone()
        labels[:8] = -100
        found.append(
            {"input_ids": ids, "labels": labels, "token_type_ids": (ids == PICTURE).long(),
             "pixel_values": torch.randn(1, 3, 8, 8, generator=drawn)}
        )  # fmt: skip
    return found


def collator(name: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Makes batches for a model."""
    if name in PATCHES:
        return lambda rows: collated(rows, name == "positions")

    def of_pictures(rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        names = ("input_ids", "labels", *(("token_type_ids",) if name == "gemma 3" else ()))
        pixels = (torch.stack if name in APART else torch.cat)([row["pixel_values"] for row in rows])
        return {"pixel_values": pixels, **{each: torch.stack([row[each] for row in rows]) for each in names}}

    return of_pictures


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
            line(_LOOPS[run.loop](name, run))
        except Exception as error:
            line(f"{type(error).__name__}: {error}")


def _trained(name: str, run: Pictured) -> list[float]:
    import torch
    import transformers
    from transformers.trainer_callback import PrinterCallback

    torch.manual_seed(0)
    changes = {"remove_unused_columns": False, "per_device_train_batch_size": 2, "prediction_loss_only": True}
    given: dict[str, Any] = {
        "model": MODELS[name](), "train_dataset": rows_of(name, 12, 1), "eval_dataset": rows_of(name, 5, 2),
        "args": transformers.TrainingArguments(run.folder, **(ARGUMENTS | changes | dict(run.arguments))),
        "data_collator": collator(name),
    }  # fmt: skip
    kind: Any = transformers.Trainer
    if run.config is not None:
        from engine.huggingface import Trainer

        kind, given = Trainer, given | {"engine_config": run.config, "whole": () if name in APART else run.whole}
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
    given: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}
    kind: Any = accelerate.Accelerator
    if run.config is not None:
        from engine.huggingface import Accelerator

        kind, given = Accelerator, given | {"engine_config": run.config, "whole": () if name in APART else run.whole}
    accelerator, model = kind(**given), MODELS[name]()
    rows: Any = rows_of(name, 12, 1)
    loader: Any = torch.utils.data.DataLoader(rows, 2, collate_fn=collator(name))
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


def _fitted(name: str, run: Pictured) -> list[float]:
    import lightning as L
    import torch

    class LitPictures(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = MODELS[name](), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            self.seen.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-5)

    torch.manual_seed(0)
    module, strategy = LitPictures(), "ddp"  # on one process too, since Lightning then shuffles as for the engine
    if run.config is not None:
        from engine.lightning import Strategy

        strategy = Strategy(run.config, whole=() if name in APART else run.whole)
    trainer: Any = L.Trainer(
        strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), accelerator="cpu", max_epochs=1,
        accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=run.folder,
    )  # fmt: skip
    rows: Any = rows_of(name, 12, 1)
    trainer.fit(module, torch.utils.data.DataLoader(rows, 2, collate_fn=collator(name)))
    return module.seen


_LOOPS: Mapping[str, Callable[[str, Pictured], list[float]]] = MappingProxyType(
    {"trainer": _trained, "accelerator": _looped, "lightning": _fitted}
)


def run_pictured(run: Pictured, ranks: int) -> dict[str, Any]:
    """Rank 0's account of each model on so many processes."""
    with Launch(train_pictured, ranks, run, env=ENVIRONMENT) as job:
        ended = job.end(400)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    return dict(zip(run.models, ended[0].said, strict=True))
