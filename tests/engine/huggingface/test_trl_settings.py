"""What trainers of TRL cannot do over an engine is one sentence, before TRL acts on it."""

from types import SimpleNamespace
from typing import Any

import pytest

import engine
from engine.config import load_config
from engine.hosting.arguments import refuse_rewards, refuse_trl, refuse_trl_grid

SIZES = {"train_batch_size": 16}


def of_trl(**changes: Any) -> SimpleNamespace:
    """What is read of a GRPOConfig."""
    given = {"steps_per_generation": 2, "num_iterations": 1, "gradient_accumulation_steps": 2, "use_vllm": False}
    return SimpleNamespace(**(given | changes))


@pytest.mark.parametrize(
    ("kind", "parts", "changes", "sentence"),
    [
        (
            "DistillationTrainer", {}, {},
            "DistillationTrainer of TRL is not tested over the engine; use SFTTrainer, DPOTrainer, GRPOTrainer, "
            "RLOOTrainer, KTOTrainer or RewardTrainer.",
        ),
        (
            "GRPOTrainer", {}, {"use_vllm": True},
            "SimpleNamespace has use_vllm, but completions come from the engine's weights, which vLLM cannot read; "
            "remove it.",
        ),
        (
            "GRPOTrainer", {}, {"cache_implementation": "static"},
            "SimpleNamespace has cache_implementation, but eng.generate chooses its own cache; remove it.",
        ),
        (
            "GRPOTrainer", {"tools": [len]}, {},
            "GRPOTrainer was given tools, by which ranks generate different numbers of times, but the engine generates "
            "on all ranks together; remove it.",
        ),
        (
            "RLOOTrainer", {}, {"steps_per_generation": 1, "num_iterations": 3},
            "SimpleNamespace has steps_per_generation 1, num_iterations 3 and gradient_accumulation_steps 2, so "
            "completions would be generated inside a step; set steps_per_generation to a multiple of "
            "gradient_accumulation_steps.",
        ),
    ],
)  # fmt: skip
def test_what_trl_cannot_do_over_an_engine_is_refused(
    kind: str, parts: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        refuse_trl(kind, parts, of_trl(**changes))
    assert str(caught.value) == sentence


def test_what_trl_can_do_is_not() -> None:
    refuse_trl(None, {"tools": [len]}, of_trl(use_vllm=True))
    refuse_trl("SFTTrainer", {"tools": None}, SimpleNamespace())
    refuse_trl("GRPOTrainer", {}, of_trl(steps_per_generation=4))


@pytest.mark.parametrize(
    ("kind", "changes", "raw", "sentence"),
    [
        (
            "GRPOTrainer", {}, {"parallel": {"tensor": 2}},
            "GRPOTrainer of TRL was given parallel.tensor 2, but it counts every process as a data rank; remove "
            "parallel.tensor, or use SFTTrainer or DPOTrainer.",
        ),
        (
            "SFTTrainer", {}, {"parallel": {"pipeline": 2}},
            "SFTTrainer of TRL was given parallel.pipeline 2, but its loss multiplies by the weight of the head, which "
            "only the last stage has; remove parallel.pipeline.",
        ),
        (
            "DPOTrainer", {"sync_ref_model": True}, {"zero_optimization": {"stage": 3}},
            "SimpleNamespace has sync_ref_model, which reads full weights of the trained model on every rank, but a "
            "rank has a part of them; remove parallel.tensor and set zero_optimization.stage to 2, or remove "
            "sync_ref_model.",
        ),
    ],
)  # fmt: skip
def test_grids_on_which_trl_would_compute_something_else_are_refused(
    kind: str, changes: dict[str, Any], raw: dict[str, Any], sentence: str
) -> None:
    config = load_config(SIZES | raw, 2)
    with pytest.raises(engine.ConfigError) as caught:
        refuse_trl_grid(kind, SimpleNamespace(**changes), config)
    assert str(caught.value) == sentence
    refuse_trl_grid(kind, SimpleNamespace(**changes), load_config(SIZES, 2))


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([1.0], "1 rewards for 2 completions; return one for each."),
        (1.0, "a float for 2 completions; return one for each."),
        (
            [1.0, "good"],
            "'good' for a completion, which is not a number; return numbers, and None for a completion without a "
            "reward.",
        ),
    ],
)
def test_rewards_that_are_not_numbers_are_refused(rewards: Any, said: str) -> None:
    refuse_rewards("letters", [None, 2], 2)
    with pytest.raises(engine.EngineError) as caught:
        refuse_rewards("letters", rewards, 2)
    assert str(caught.value) == f"the reward function letters returned {said}"
