"""Trials of a configuration in which data ranks share experts."""

from engine.config import load_config
from engine.launch.verifier.trials import small_config, switched_off


def test_a_trial_keeps_the_expert_axis_and_the_search_switches_it_off() -> None:
    config = load_config({"train_batch_size": 16, "parallel": {"data": 8, "expert": 4, "pipeline": 2}}, world_size=16)
    small = small_config(config)
    assert (small.dp, small.parallel.expert) == (2, 2)
    found = {name: (each.dp, each.parallel.expert) for name, each in switched_off(small)}
    assert found["parallel.expert"] == (2, 1)
    assert found["parallel.data"] == (1, 1)
    assert found["parallel.pipeline"] == (2, 2)
