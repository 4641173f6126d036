"""Which options a parameter gets by its names."""

from engine.config.optim_sections import OptimizerConfig
from engine.optim.param_groups import assign_groups
from tests import models


def test_a_pattern_may_match_any_name_of_a_tied_parameter() -> None:
    """``head.weight`` is the second name of ``tokens.weight``."""
    for pattern in ("tokens.weight", "head.weight"):
        groups, options = assign_groups(models.decoder(tied=True), OptimizerConfig(no_weight_decay=(pattern,)))
        assert options[groups["tokens.weight"]].weight_decay == 0.0, pattern
        assert [name for name, group in groups.items() if options[group].weight_decay == 0.0] == ["tokens.weight"]
