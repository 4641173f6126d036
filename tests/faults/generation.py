"""Faults of generation: caches on stages, random numbers, and rows of one batch."""

from tests.faults.fault import Fault

_GRIDS = "tests/engine/generation/test_every_grid.py"
_REQUESTS = "tests/engine/generation/test_requests.py"

GENERATION = (
    Fault(
        name="cache-of-another-stage-stays-short",
        about="A stage's cache counts no positions for layers of other stages, so its masks and windows are too short.",
        file="engine/generation/caches.py",
        old="        for cache in self._of.values() if partly else ():\n",
        new="        for cache in ():\n",
        tests=(f"{_GRIDS}::test_tokens_are_those_of_transformers_in_one_process[Mistral-pp2]",),
    ),
    Fault(
        name="drawn-by-place-in-the-completion",
        about="The random number of a token counts tokens of the completion, so a request that continues draws others.",
        file="engine/generation/requests.py",
        old="position = self.request, len(self.request.tokens) + len(self.tokens)\n",
        new="position = self.request, len(self.tokens)\n",
        tests=(f"{_REQUESTS}::test_a_request_that_continues_draws_the_same_tokens",),
    ),
    Fault(
        name="ended-rows-take-positions",
        about="A row that has ended takes a position for each token of its batch mates, beyond those of the model.",
        file="engine/generation/steps.py",
        old="        pairs = [(0, 0) if token is None",
        new="        pairs = [(0, 1) if token is None",
        tests=(f"{_REQUESTS}::test_a_row_that_has_ended_takes_no_more_positions",),
    ),
    Fault(
        name="all-parameters-held-for-a-call",
        about="Parameters are gathered once for a call of any size, although the plan keeps none of them.",
        file="engine/generation/forwards.py",
        old="        self._holds = gathers is not None and len(gathers.pinned) == len(gathers.sizes)\n",
        new="        self._holds = gathers is not None\n",
        tests=(f"{_GRIDS}::test_zero3_gathers_once_if_the_plan_keeps_all_parameters_else_for_each_token[False]",),
    ),
)
