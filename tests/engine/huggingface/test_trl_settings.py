"""What trainers of TRL cannot do over an engine is one sentence, before TRL acts on it."""

from types import SimpleNamespace
from typing import Any

import pytest

import engine
from engine.config import load_config
from engine.hosting.arguments import refuse_rewards, refuse_trl, refuse_trl_grid, rows_of_generation

SIZES = {"train_batch_size": 16}
VLLM = {"weights_out": {"to": [{"vllm": "http://a:8000"}]}}


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
            "KTOTrainer", {}, {"parallel": {"tensor": 2}},
            "KTOTrainer of TRL was given parallel.tensor 2, but it counts every process as a data rank; remove "
            "parallel.tensor, or use SFTTrainer, DPOTrainer, GRPOTrainer or RLOOTrainer.",
        ),
        (
            "GRPOTrainer", {"use_vllm": True}, {},
            "SimpleNamespace has use_vllm, but engine_config names no vLLM server to which the weights go; set "
            'weights_out.to, such as [{"vllm": "http://vllm:8000"}].',
        ),
        (
            "GRPOTrainer", {"use_vllm": True, "vllm_mode": "colocate"}, VLLM,
            'SimpleNamespace has vllm_mode "colocate", but vLLM reads the weights as a server; set vllm_mode="server".',
        ),
        (
            "GRPOTrainer", {"use_vllm": True, "vllm_server_base_url": "http://b:8000"}, VLLM,
            "weights_out.to is http://a:8000 in engine_config and vllm_server_base_url is http://b:8000 in "
            'TrainingArguments, but a run has one; set the same value, or "auto" in engine_config.',
        ),
        (
            "RLOOTrainer", {"use_vllm": True}, VLLM,
            "SimpleNamespace has use_vllm, but RLOOTrainer does not compare log-probabilities of vLLM and trainer; "
            "remove it, or use GRPOTrainer.",
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
    args = SimpleNamespace(**{"vllm_mode": "server", "vllm_server_base_url": None} | changes)
    with pytest.raises(engine.ConfigError) as caught:
        refuse_trl_grid(kind, args, config)
    assert str(caught.value) == sentence
    args.use_vllm, args.vllm_server_base_url = raw == VLLM and kind == "GRPOTrainer", "http://a:8000"
    args.vllm_mode = "server"
    refuse_trl_grid(kind, args, load_config(SIZES | (VLLM if args.use_vllm else {}), 2))


def test_rows_of_a_generation_are_those_of_data_ranks() -> None:
    args = SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=2, num_generations=4)
    assert [rows_of_generation(args, ranks) for ranks in (1, 2)] == [4, 8]
    args.num_generations = 8
    with pytest.raises(engine.ConfigError) as caught:
        rows_of_generation(args, 1)
    assert str(caught.value) == (
        "SimpleNamespace has num_generations 8, but 4 rows are generated at a time on 1 data rank(s); set "
        "per_device_train_batch_size to a multiple of num_generations."
    )


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
