"""Training runs of Hugging Face's Trainer, alone or over the engine, as jobs of a launcher's processes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launches import Launch, Line

ENVIRONMENT = {"TRINE_QUIET": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
VOCABULARY, TOKENS = 64, 12
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2,
    "num_train_epochs": 2, "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
    "load_best_model_at_end": True, "report_to": [], "disable_tqdm": True, "use_cpu": True,
    "dataloader_pin_memory": False, "seed": 7,
}  # fmt: skip
"""8 rows a step and, of 32 rows, 8 steps in two epochs; checkpoints inside an epoch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, as plain data for its processes."""

    folder: str
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the host alone."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Beside :data:`ARGUMENTS`."""
    rows: int = 32
    resume: str | None = None
    own_loss: bool = False
    """With ``compute_loss_func``."""
    subclass: bool = False
    """A subclass computes the loss."""
    stream: bool = False
    """The rows have no length and are read in their order."""
    twice: bool = False
    """Evaluate, train, and train once more, of which the account is given."""
    experts: bool = False
    """The model is a mixture of experts."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What rank 0 says of a run."""

    history: list[dict[str, float]]
    calls: dict[str, int]
    """Calls of callbacks by name."""
    logits: Any
    """Of ``predict`` over the rows of evaluation and two more, which do not fill batches."""
    metrics: dict[str, float]
    """Of ``predict``."""
    names: list[str]
    """Files below the folder."""

    def of(self, name: str) -> dict[int, float]:
        """Step -> a logged value."""
        return {int(entry["step"]): entry[name] for entry in self.history if name in entry}


def dataset(rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of tokens whose labels end at different places."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(rows):
        ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=drawn)
        labels, end = ids.clone(), int(torch.randint(6, TOKENS, (1,), generator=drawn))
        labels[end:] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def small_model(experts: bool = False) -> Any:
    """A Llama, or a Qwen3-MoE, of two layers, the same at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if experts:
        sizes: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **sizes))
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def tokenizer() -> Any:
    """A tokenizer of words that are numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))


def summed_loss(output: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """Cross-entropy with logits made smaller, over all items of the step."""
    from torch.nn import functional as F

    logits, wanted = output.logits[:, :-1].flatten(0, 1) / 2, labels[:, 1:].flatten()
    return F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum") / num_items_in_batch


def metrics_of(found: Any) -> dict[str, float]:
    """Rows that were gathered, and how many labels are the likeliest token."""
    return {
        "rows": float(len(found.predictions)),
        "right": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean()),
    }


def streamed(rows: list[dict[str, Any]]) -> Any:
    """A dataset that can only be read from its begin."""
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(rows)

    return Stream()


def own_kind(kind: Any) -> Any:
    """A Trainer that computes the loss from the model's outputs."""

    class Own(kind):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"]
            output = model(input_ids=inputs["input_ids"])
            count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
            ranks = 1 if num_items_in_batch is None else self.accelerator.num_processes  # over which it is averaged
            loss = summed_loss(output, labels, count) * ranks
            return (loss, {"loss": loss, "logits": output.logits}) if return_outputs else loss

    return Own


def make_trainer(case: Case) -> Any:
    """The Trainer of a case with a callback that counts, in ``trainer.counted``."""
    import transformers
    from transformers.trainer_callback import PrinterCallback

    counted: dict[str, int] = {}

    class Counting(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            counted["step begin"] = counted.get("step begin", 0) + 1

        def on_step_end(self, *_: Any, **__: Any) -> None:
            counted["step end"] = counted.get("step end", 0) + 1

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            counted["substep end"] = counted.get("substep end", 0) + 1

        def on_save(self, *_: Any, **__: Any) -> None:
            counted["save"] = counted.get("save", 0) + 1

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            counted["evaluate"] = counted.get("evaluate", 0) + 1

    given: dict[str, Any] = {
        "model": small_model(case.experts),
        "args": transformers.TrainingArguments(output_dir=case.folder, **(ARGUMENTS | dict(case.arguments))),
        "train_dataset": dataset(case.rows, 1), "eval_dataset": dataset(8, 2), "compute_metrics": metrics_of,
        "callbacks": [Counting()], "processing_class": tokenizer(),
        "data_collator": transformers.default_data_collator,
    }  # fmt: skip
    if case.stream:
        given["train_dataset"] = streamed(given["train_dataset"])
    if case.own_loss:
        given["compute_loss_func"] = summed_loss
    kind: Any = transformers.Trainer
    if case.config is not None:
        from engine.huggingface import Trainer

        kind, given = Trainer, given | {"engine_config": case.config}
    trainer: Any = (own_kind(kind) if case.subclass else kind)(**given)
    trainer.remove_callback(PrinterCallback)
    trainer.counted = counted
    return trainer


def train(line: Line, case: Case) -> None:
    """Train, predict, and say what was seen; rank 0's is the :class:`Ran`, of others the losses."""
    trainer = make_trainer(case)
    if case.twice:
        trainer.evaluate()
        trainer.train()
        trainer.counted.clear()
    trainer.train(resume_from_checkpoint=case.resume)
    predicted = trainer.predict(dataset(10, 2))
    history = list(trainer.state.log_history)
    if not trainer.is_world_process_zero():
        line([entry["loss"] for entry in history if "loss" in entry])
        return
    names = sorted(str(path.relative_to(case.folder)) for path in Path(case.folder).rglob("*") if path.is_file())
    line(
        Ran(
            history=history, calls=trainer.counted, logits=predicted.predictions, metrics=dict(predicted.metrics),
            names=names,
        )
    )  # fmt: skip


def run(case: Case, ranks: int = 1) -> Ran:
    """Rank 0's account of a run on so many processes."""
    with Launch(train, ranks, case, env=ENVIRONMENT) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    first: Ran = ended[0].said[0]
    losses = [entry["loss"] for entry in first.history if "loss" in entry]
    assert all(end.said[0] == losses for end in ended[1:]), "every rank logs the same"
    return first


def read_folder(line: Line, folder: str) -> None:
    """Say the logits of a folder's model for the rows of ``predict``, and the words of its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = torch.stack([row["input_ids"] for row in dataset(10, 2)])
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        line(model.eval()(input_ids=rows).logits.numpy())
    line(len(AutoTokenizer.from_pretrained(folder)))


def folder_logits(folder: Path) -> Any:
    """Logits of the model in a folder, as transformers loads it alone."""
    with Launch(read_folder, 1, str(folder), env=ENVIRONMENT) as job:
        (ended,) = job.end(120)
    assert ended.code == 0, ended.error
    logits, words = ended.said
    assert words == VOCABULARY
    return logits


def state_of(folder: Path) -> dict[str, Any]:
    """The host's own account of a checkpoint."""
    found: dict[str, Any] = json.loads((folder / "trainer_state.json").read_text())
    return found
