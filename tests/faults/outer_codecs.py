"""Faults of pushed values and fragments: damaged messages, numbers that vanish, feedback, tensors of no fragment."""

from tests.faults.fault import Fault

_CODECS = "tests/engine/outer/test_codecs.py"
_FRAGMENTS = "tests/engine/outer/test_fragments.py"

OUTER_CODECS = (
    Fault(
        name="bad-numbers-not-the-largest",
        about="A NaN in a delta is smaller than every number, so top-k drops it and the merge looks healthy.",
        file="engine/outer/codecs.py",
        old="    size_Cs = torch.where(values_Cs.isfinite(), values_Cs.abs(), torch.inf)\n",
        new="    size_Cs = torch.where(values_Cs.isfinite(), values_Cs.abs(), 0.0)\n",
        tests=(f"{_CODECS}::test_a_number_that_is_not_finite_stays_visible",),
    ),
    Fault(
        name="residual-of-the-values-alone",
        about="The error of a message is computed without the last residual, so older errors are lost.",
        file="engine/outer/codecs.py",
        old="    error_n = wanted_n - codec.decode(message_m, len(wanted_n))\n",
        new="    error_n = values_n.double() - codec.decode(message_m, len(wanted_n))\n",
        tests=(f"{_CODECS}::test_feedback_sends_all_in_time",),
    ),
    Fault(
        name="repeated-indexes-merged",
        about="A damaged message with one index twice passes, and the second value overwrites the first.",
        file="engine/outer/codecs.py",
        old="        if bool((place_t[1:] <= place_t[:-1]).any()):\n",
        new="        if bool((place_t[1:] < place_t[:-1]).any()):\n",
        tests=(f"{_CODECS}::test_indexes_after_the_last_element_and_repeated_ones_are_refused",),
    ),
    Fault(
        name="two-bits-with-wrong-signs",
        about="Top-k in 2 bits sends every number with the opposite sign, so the model moves uphill.",
        file="engine/outer/codecs.py",
        old="(kept_Ck < 0).long()",
        new="(kept_Ck >= 0).long()",
        tests=(f"{_CODECS}::test_two_bits_send_a_sign_and_one_of_two_means",),
    ),
    Fault(
        name="neighbours-in-one-fragment",
        about="A fragment has neighbouring blocks, so a push changes one end of the model alone.",
        file="engine/outer/fragments.py",
        old="order[block] % fragments",
        new="order[block] * fragments // len(order)",
        tests=(f"{_FRAGMENTS}::test_blocks_are_strided_and_the_rest_joins_the_lightest",),
    ),
    Fault(
        name="fragments-pushed-together",
        about="All fragments are due at the same step, so a site sends the whole model at once.",
        file="engine/outer/fragments.py",
        old="    return step > 0 and (step - index * period // fragments) % period == 0\n",
        new="    return step > 0 and (step - index // fragments * period) % period == 0\n",
        tests=(f"{_FRAGMENTS}::test_the_first_push_has_a_step_before_it",),
    ),
)
