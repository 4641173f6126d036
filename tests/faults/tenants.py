"""Faults of tenants: in what they borrow, draw, and leave on the device."""

from tests.faults.fault import Fault

_POOL = "tests/engine/serving/tenants/test_pool.py"
_GRIDS = "tests/engine/serving/tenants/test_grids.py"

TENANTS = (
    Fault(
        name="heads-of-a-wrapped-layer-split",
        about="The plan of a tenant loses the width of heads, so that one key head is cut in two.",
        file="engine/serving/tenants/skeleton.py",
        old='    return style.text if whole else f"{style.text} head:{width}"\n',
        new="    return style.text\n",
        tests=(f"{_GRIDS}::test_pairs_follow_fused_and_shared_columns[one key head]",),
    ),
    Fault(
        name="ratios-of-unwrapped-layers",
        about="A written ratio of heads names layers that adapters have wrapped.",
        file="engine/serving/tenants/skeleton.py",
        old='BASE * (f"{name}.{child[0]}" in wrapped)',
        new='""',
        tests=(f"{_GRIDS}::test_pairs_follow_fused_and_shared_columns[one key head]",),
    ),
    Fault(
        name="tenants-have-copies-of-the-base",
        about="A tenant gets memory of its own for the frozen parameters, in place of the base's.",
        file="engine/build/place_model.py",
        old="            found[row.name] = given\n",
        new="            found[row.name] = given.clone()\n",
        tests=(f"{_POOL}::test_a_tenant_stores_its_pairs_their_gradients_and_moments_and_a_drop_frees_them",),
    ),
    Fault(
        name="pairs-drawn-alike",
        about="Pairs are drawn by their layer alone, so that tenants with different seeds start alike.",
        file="engine/serving/tenants/adapters.py",
        old='f"{seed} {base_name(name)}"',
        new="base_name(name)",
        tests=(f"{_POOL}::test_pairs_are_drawn_by_seed_and_layer",),
    ),
    Fault(
        name="pairs-are-left-to-the-engine",
        about="Pairs stay on the meta device, so that the engine draws A and B by the model's own initialisation.",
        file="engine/serving/tenants/adapters.py",
        old="value = torch.zeros(weight.shape, dtype=weight.dtype)",
        new="value = torch.zeros_like(weight)",
        tests=(f"{_POOL}::test_a_fresh_tenant_computes_what_its_base_does[one rank]",),
    ),
    Fault(
        name="full-tenants-stay-on-the-device",
        about="A full-parameter tenant keeps its state on the device while another one is resident.",
        file="engine/serving/tenants/pool.py",
        old="                tenant.engine.offload_states(unfinished=True)\n",
        new="",
        tests=(f"{_POOL}::test_one_full_tenant_has_its_state_on_the_device",),
    ),
)
