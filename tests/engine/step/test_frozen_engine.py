"""Engines of models without a trainable parameter: reference, reward and teacher models beside one that is trained."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from tests import models
from tests.engine.every_grid import every_grid

RunRanks = Callable[..., list[Any]]
ROWS, STEPS, CLIP, BETA = 4, 3, 0.1, 0.05


def settings(grid: dict[str, Any], stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS * grid.get("data", 1),
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "zero_optimization": {"stage": stage},
        "parallel": grid,
        **more,
    }


def policy() -> nn.Module:
    return models.llama()


def reference() -> nn.Module:
    """Another model than the policy, without a trainable parameter."""
    model = models.llama().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02)
    return model


def data(world: int) -> list[Tensor]:
    return [ids[:, : models.LENGTH] for ids in models.token_batches(ROWS * world, STEPS)]


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each token that follows, [rows, tokens - 1]."""
    shifted, target = logits[:, :-1], ids[:, 1:]
    return -F.cross_entropy(shifted.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def objective(new: Tensor, old: Tensor, ids: Tensor) -> Tensor:
    """Policy gradient with advantages of both signs, and a penalty for what differs from the reference."""
    advantages = (ids[:, :1] % 5 - 2).float()
    return -(advantages * new).mean() + BETA * (new - old).square().mean()


def in_one_process(dp: int) -> tuple[list[float], dict[str, Tensor]]:
    model, fixed, norms = policy(), reference(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for ids in data(dp):
        with torch.no_grad():
            old = log_probabilities(fixed(input_ids=ids).logits, ids)
        objective(log_probabilities(model(input_ids=ids).logits, ids), old, ids).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def on_ranks(config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Body of a rank: the policy's own forward without labels, and the reference's logits by ``predict``."""
    example, norms = {"input_ids": data(1)[0]}, []
    fixed = engine.initialize(reference(), config | {"optimizer": None}, example_batch=example)
    with fixed, engine.initialize(policy(), config, example_batch=example) as eng:
        assert sum(p.numel() for group in fixed.optimizer.param_groups for p in group["params"]) == 0
        for batch in data(eng.grid.dp):
            ids = batch.chunk(eng.grid.dp)[eng.grid.coord().dp]
            old = log_probabilities(fixed.predict({"input_ids": ids}).logits, ids)
            eng.backward(objective(log_probabilities(eng(input_ids=ids).logits, ids), old, ids))
            report = eng.step()
            assert report is not None
            norms.append(report.grad_norm)
        return norms, eng.full_state_dict()


@pytest.mark.parametrize(
    ("grid", "stage"),
    [case for case in every_grid("dp2-zero3") if "pipeline" not in case.values[0]],
)
def test_a_policy_beside_its_reference_trains_as_in_one_process(
    grid: dict[str, Any], stage: int, run_ranks: RunRanks
) -> None:
    norms, weights = run_ranks(on_ranks, math.prod(grid.values()), settings(grid, stage))[0]
    expected = in_one_process(grid["data"])
    assert min(expected[0]) > CLIP and norms == pytest.approx(expected[0], rel=1e-5)
    assert max(float((weights[name] - value).abs().max()) for name, value in expected[1].items()) <= 1e-5


def evaluated(config: dict[str, Any], folder: Path) -> tuple[float, Tensor, Tensor, str]:
    """Body of a rank: loss, logits and tokens of a frozen model that a checkpoint has restored; training is refused."""
    dp = config["parallel"]["data"]
    ids, batch = torch.ones(2, 4, dtype=torch.long), models.batches_for("llama", ROWS * dp, 1)[0]
    example = {name: value[:ROWS] for name, value in batch.items()}
    with engine.initialize(reference(), config, example_batch=example) as eng:
        eng.save_checkpoint(folder).wait()
        with eng.full_parameters() as parameters, torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        eng.load_checkpoint(folder)
        mine = {name: value.chunk(dp)[eng.grid.coord().dp] for name, value in batch.items()}
        loss, tokens = eng.eval_batch(mine).loss, eng.generate(ids, max_new_tokens=4, pad_token_id=0)
        with pytest.raises(engine.EngineError) as caught:
            eng.train_batch(mine)
        return loss, eng.predict({"input_ids": ids}).logits, tokens, str(caught.value)


@pytest.mark.parametrize(("grid", "stage"), every_grid("dp2-zero3"))
def test_a_frozen_model_predicts_and_is_not_trained(
    grid: dict[str, Any], stage: int, tmp_path: Path, run_ranks: RunRanks
) -> None:
    model, ids = reference().eval(), torch.ones(2, 4, dtype=torch.long)
    whole = models.batches_for("llama", ROWS * grid["data"], 1)[0]
    with torch.no_grad():
        expected = float(model(**whole).loss), model(input_ids=ids).logits
        expected_tokens = model.generate(ids, max_new_tokens=4, pad_token_id=0)  # type: ignore[operator]
    for loss, logits, tokens, refused in run_ranks(
        evaluated, math.prod(grid.values()), settings(grid, stage), tmp_path
    ):
        assert loss == pytest.approx(expected[0], rel=1e-5) and torch.equal(tokens, expected_tokens)
        assert float((logits - expected[1]).abs().max()) < 1e-5
        assert refused.startswith("train_batch was called, but the model has no trainable parameter; set requires_grad")
