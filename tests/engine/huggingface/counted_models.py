"""Models whose forward takes the number of items of a step, and divides its loss by it, in part, or not at all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engine.huggingface.host_runs import ENVIRONMENT, HEADS, SIZES, VOCABULARY, dataset, small_model
from tests.launches import Launch, Line

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 2,
    "num_train_epochs": 1, "learning_rate": 1e-2, "adam_epsilon": 1e-5, "max_grad_norm": 0.5, "logging_steps": 1,
    "eval_strategy": "epoch", "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
    "dataloader_pin_memory": False, "seed": 7,
}  # fmt: skip
ROWS = 28
"""Three steps of two microbatches, and one of a single microbatch; six rows of evaluation are four and two."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a run of a model gave."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    weights: Mapping[str, Any]
    error: str = ""
    """Of a run that was refused."""


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """Runs of models, as plain data for their processes."""

    folder: str
    models: tuple[str, ...]
    config: Mapping[str, Any] | None = None
    """The engine's configuration; None: the host alone."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: int = ROWS


def token_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a label for every token."""
    return dataset(count, seed)


def class_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with one of three classes."""
    return [row | {"labels": int(row["input_ids"][0]) % 3} for row in dataset(count, seed)]


def sound_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of features with the tokens that were spoken."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    rows = dataset(count, seed)
    return [{"input_features": torch.randn(8, 32, generator=drawn), "labels": row["labels"]} for row in rows]


def bert() -> Any:
    """A classifier, whose loss ignores what its forward takes by ``**kwargs``."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 64, "num_labels": 3}
    off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **off))


def whisper() -> Any:
    """An encoder and decoder, whose loss ignores it too."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=16, max_target_positions=16,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.0,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def mixture() -> Any:
    """Experts, whose balance is added to a loss that is divided by the number of items."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, **experts, output_router_logits=True))


def llama_of_means() -> Any:
    """A causal model that is given no number of items, so its loss is the mean over its shifted labels."""
    made = small_model()
    made.accepts_loss_kwargs = False
    return made


def mean_of_own() -> Any:
    """A module that takes anything and returns a mean in a tuple."""
    return _own_model(divides=False)


def sum_of_own() -> Any:
    """A module that divides by the number of items."""
    return _own_model(divides=True)


def _own_model(divides: bool) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = None
            self.embedding = nn.Embedding(VOCABULARY, 32)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in "ab")
            self.head = nn.Linear(32, VOCABULARY)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
            x_BSD = self.embedding(input_ids)
            for block in self.blocks:
                x_BSD = x_BSD + block(x_BSD)
            logits_BSV = self.head(x_BSD)
            count = kwargs.get("num_items_in_batch") if divides else None
            how = "mean" if count is None else "sum"
            loss = F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten(), reduction=how)
            return {"loss": loss if count is None else loss / count, "logits": logits_BSV}

    return Own()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int, int], list[dict[str, Any]]]]] = {
    "bert": (bert, class_rows),
    "whisper": (whisper, sound_rows),
    "mean of own": (mean_of_own, token_rows),
    "sum of own": (sum_of_own, token_rows),
    "llama": (small_model, token_rows),
    "mixture": (mixture, token_rows),
}
MEANS = MODELS | {"llama of means": (llama_of_means, token_rows)}
"""With a model whose mean refuses the microbatch that the last step lacks on a pipeline."""


def train_counted(line: Line, run: CountedRun) -> None:
    """Train each model in turn; rank 0 says a :class:`Counted` of each."""
    for name in run.models:
        line(_trained(name, run))


def _trained(name: str, run: CountedRun) -> Counted:
    import torch
    import transformers
    from transformers.trainer_callback import PrinterCallback

    torch.manual_seed(0)
    make, rows = MEANS[name]
    given: dict[str, Any] = {
        "model": make(), "args": transformers.TrainingArguments(run.folder, **(ARGUMENTS | dict(run.arguments))),
        "train_dataset": rows(run.rows, 1), "eval_dataset": rows(6, 2),
        "data_collator": transformers.default_data_collator,
    }  # fmt: skip
    kind: Any = transformers.Trainer
    if run.config is not None:
        from engine.huggingface import Trainer

        kind, given = Trainer, given | {"engine_config": run.config}
    trainer = kind(**given)
    trainer.remove_callback(PrinterCallback)
    error = ""
    try:
        trainer.train()
    except Exception as problem:
        if run.config is None:
            raise
        error = str(problem)
    weights = given["model"].state_dict() if run.config is None else trainer.engine.full_state_dict()
    weights = {key: value.detach().numpy().copy() for key, value in weights.items()}
    if run.config is not None:
        trainer.engine.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return Counted(
        losses=[entry["loss"] for entry in logged], norms=[entry["grad_norm"] for entry in logged],
        evaluated=evaluated[0] if evaluated else 0.0, weights=weights, error=error,
    )  # fmt: skip


def run_counted(run: CountedRun, ranks: int) -> dict[str, Counted]:
    """Rank 0's account of each model on so many processes."""
    with Launch(train_counted, ranks, run, env=ENVIRONMENT) as job:
        ended = job.end(400)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    assert all(end.said[0].losses == ended[0].said[0].losses for end in ended), "every rank logs the same"
    return dict(zip(run.models, ended[0].said, strict=True))
