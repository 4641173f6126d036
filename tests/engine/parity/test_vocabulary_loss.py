"""Losses of logits that are cut over the vocabulary: the engine against one process, and bytes against the plan."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.verify import Parity, verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows

RunRanks = Callable[..., list[Any]]


def penalized(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Label smoothing and a z-loss, as sum and weight."""
    labels = batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100)
    total = functional.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1, reduction="sum")
    penalty = torch.logsumexp(logits, dim=-1).square().mul(labels >= 0).sum()
    return total + 1e-3 * penalty, (labels >= 0).sum()


def from_log_probabilities(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """As it was written before cross_entropy, with weights of classes."""
    scores = functional.log_softmax(logits.float() / 0.9, dim=-1)
    weight = torch.linspace(0.5, 1.5, scores.shape[-1], device=scores.device)
    return functional.nll_loss(scores.flatten(0, 1), batch["labels"].flatten(), weight=weight)


def handwritten(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Gathered scores of the labels, shifted inside the logits."""
    kept = logits[..., :-1, :].contiguous()
    picked = kept.gather(-1, batch["labels"][:, :-1].unsqueeze(-1)).squeeze(-1)
    return (kept.logsumexp(-1) - picked).mean()


def small() -> nn.Module:
    """Fewer than two words a rank."""
    torch.manual_seed(7)
    return Decoder(DecoderConfig(vocabulary=7, layers=2, width=32, heads=4, context=models.LENGTH))


def bert() -> nn.Module:
    """Hugging Face BERT: the head lies in a module of its own, with a bias, tied to the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(7)
    sizes = BertConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=models.LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(sizes)


def gemma2() -> nn.Module:
    """Hugging Face Gemma 2: soft-capped logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(7)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=models.LENGTH,
            query_pre_attn_scalar=8,
        )
    )  # fmt: skip


BERT = {
    "bert.embeddings.word_embeddings": "vocabulary", "cls.predictions.decoder": "vocabulary",
    "*.query": "column head:8", "*.key": "column head:8", "*.value": "column head:8", "*.attention.output.dense": "row",
    "*.intermediate.dense": "column", "bert.encoder.layer.*.output.dense": "row",
    "*.attention.self": "divide:num_attention_heads,all_head_size",
}  # fmt: skip
T5 = {"shared": "vocabulary", "*.embed_tokens": "vocabulary", "lm_head": "vocabulary"}

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "penalized": (models.decoder, penalized, "auto"),
    "penalized tied": (partial(models.decoder, tied=True), penalized, "auto"),
    "log-probabilities": (models.decoder, from_log_probabilities, "auto"),
    "handwritten": (models.decoder, handwritten, "auto"),
    "small": (small, loss_sum, "auto"),
    "llama": (models.llama, None, "auto"),
    "gemma2": (gemma2, None, "auto"),
    "bert": (bert, None, BERT),
    "t5": (partial(models.t5, dropout=0.0), None, T5),
}


def batches(name: str, steps: int = 3) -> list[Any]:
    """Global batches of 16 rows."""
    kind = "llama" if name in ("gemma2", "bert") else name.split()[0]
    given = models.batches_for(kind, 16, steps)
    if MODELS[name][1] is None:
        return [batch | {"labels": batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100)} for batch in given]
    if name == "small":
        return [{key: value % 7 for key, value in batch.items()} for batch in given]
    return given


def trains(name: str, settings: dict[str, Any]) -> tuple[Parity | None, dict[str, Any], dict[str, Any], Any]:
    """Body of a rank: the comparison; traffic over tp, planned and measured; the notes of the plan."""
    build, loss_fn, plan = MODELS[name]
    settings = settings | {"parallel": settings["parallel"] | {"tensor_plan": plan}}
    parity = verify(build, settings, batches(name), loss_fn)
    first, second = batches(name, 2)
    with engine.initialize(build, settings, loss_fn, take_rows(first, 0, 2)) as eng:
        eng.train_batch(first)
        before = eng.sent
        eng.train_batch(second)
        sent = eng.sent.since(before).rows()
        planned = eng.plan.rank(eng.grid.rank).traffic
        rows = [{row.label: (row.calls, row.bytes) for row in found if row.axis == "tp"} for found in (sent, planned)]
        return parity, rows[0], rows[1], eng.plan.notes


GRIDS: dict[str, dict[str, int]] = {
    "tp2": {"tensor": 2},
    "tp4": {"tensor": 4},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
}
CASES = [(name, grid) for name in MODELS for grid in GRIDS if (name, grid) != ("t5", "tp2 x pp2")]
SHORT = [("penalized tied", "tp2")]


@pytest.mark.parametrize(
    ("name", "grid"), [pytest.param(*case, marks=[pytest.mark.long] * (case not in SHORT)) for case in CASES]
)
def test_losses_equal_one_process_and_send_what_the_plan_says(run_ranks: RunRanks, name: str, grid: str) -> None:
    settings = config_for(1, 0, parallel={"data": 1} | GRIDS[grid])
    found = run_ranks(trains, prod(GRIDS[grid].values()), name, settings)
    parity = found[0][0]
    assert parity is not None and parity.holds(), str(parity)
    for _, measured, planned, notes in found:
        assert measured == planned and "logits" not in measured
        assert not any("gathered" in note for note in notes)
    assert any("loss" in measured for _, measured, _, _ in found)
