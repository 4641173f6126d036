"""Faults of attention whose keys other ranks store: stale and missing keys, lost masks, gradients that stay away."""

from tests.faults.fault import Fault

_FLOW, _ATTENTION, _METHODS, _SIGHT, _RECUT = (
    f"parallel/context/{name}.py" for name in ("key_flow", "attention", "methods", "sight", "recut")
)
_BLOCK = "kernels/ops/attention_block.py"
_TESTS = "tests/parallel/context/test_attention_methods.py"
_EQUAL = f"{_TESTS}::test_every_method_is_attention_of_one_process"

CONTEXT_ATTENTION = (
    Fault(
        name="ring-with-stale-keys",
        about="Later steps of a ring compute with the keys of an earlier one.",
        file=_FLOW,
        old="            made, wait = coming\n",
        new="            made, wait = coming if number < 2 else (made, wait)\n",
        tests=(f"{_EQUAL}[all keys-ring]",),
    ),
    Fault(
        name="ring-backward-with-own-keys",
        about="The backward of a ring multiplies every block with the keys of its own rank.",
        file=_ATTENTION,
        old="            keys, values = torch.split(parcel, widths, -1)\n            sums",
        new="            keys, values = torch.split(pairs if len(pairs) == len(parcel) else parcel, widths, -1)\n"
        "            sums",
        tests=(f"{_TESTS}::test_any_number_of_ranks_and_key_heads[2-4-ring]",),
    ),
    Fault(
        name="window-is-full-attention",
        about="A bool mask hides nothing, so a window sees the whole sequence.",
        file=_BLOCK,
        old="        return scores.masked_fill_(~mask, -math.inf)\n",
        new="        return scores\n",
        tests=(f"{_EQUAL}[window-ring]",),
    ),
    Fault(
        name="mask-is-thrown-away",
        about="Attention over the keys of other ranks drops the model's mask.",
        file=_METHODS,
        old="    if mask is None:\n        return None\n    key =",
        new="    if mask is None or mask.ndim:\n        return None\n    key =",
        tests=(f"{_EQUAL}[documents-need]",),
    ),
    Fault(
        name="key-gradients-stay-away",
        about="The gradient of the keys of other ranks does not come back to their owner.",
        file=_ATTENTION,
        old="        first = first.to(dtype).add_(made)\n",
        new="        first = first.to(dtype).add_(0 * made)\n",
        tests=(f"{_EQUAL}[causal-ring]",),
    ),
    Fault(
        name="heads-permuted",
        about="Query heads meet keys of another head.",
        file=_METHODS,
        old="runs_from(np.unique(held // times))",
        new="runs_from(np.unique(held % call.key.full[-3]))",
        tests=(f"{_EQUAL}[causal-heads]",),
    ),
    Fault(
        name="needed-keys-missing",
        about="Keys that only an early query of a rank sees do not travel.",
        file=_SIGHT,
        old="            found |= part.reshape(-1, part.shape[-1]).any(0)\n",
        new="            found |= part[..., -1, :].reshape(-1, part.shape[-1]).any(0)\n",
        tests=(f"{_EQUAL}[documents-need]",),
    ),
    Fault(
        name="all-keys-are-needed",
        about="Method need sends keys that no query sees.",
        file=_SIGHT,
        old="    found = torch.stack(seen).cpu().numpy()",
        new="    found = torch.stack(seen).cpu().logical_or(torch.tensor(True)).numpy()",
        tests=(f"{_TESTS}::test_needed_keys_alone_are_sent[documents]",),
    ),
    Fault(
        name="gradients-overwrite-each-other",
        about="The gradient of an element that several ranks read is that of one of them.",
        file=_RECUT,
        old="part.view(boxes.get_sizes[rank]), add)",
        new="part.view(boxes.get_sizes[rank]))",
        tests=("tests/parallel/context/test_recut.py::test_elements_travel_to_those_who_want_them_and_gradients_back",),
    ),
    Fault(
        name="softmax-of-each-block",
        about="Outputs of blocks are added without the weight that their log-sum-exp gives them.",
        file=_ATTENTION,
        old="        total[..., rows, :].mul_((before - base).exp_()[..., None])\n",
        new="",
        tests=(f"{_EQUAL}[all keys-ring]",),
    ),
    Fault(
        name="padding-does-not-see",
        about="Queries from which a finite mask hides all keys get no mean of the values, as torch gives them.",
        file=_ATTENTION,
        old="BlockRule(self.scale, block.causal, rows, unseeing)",
        new="BlockRule(self.scale, block.causal, rows)",
        tests=(f"{_EQUAL}[added, finite-gather]",),
    ),
    Fault(
        name="keys-stored-until-backward",
        about="Every layer stores the keys of all ranks between forward and backward.",
        file=_ATTENTION,
        old="if ctx.recipe is not None else rows, out, lse)\n",
        new="if ctx.recipe is not None else rows, out, lse, parcel)\n",
        tests=(f"{_TESTS}::test_nothing_of_the_full_length_is_stored_for_backward[gather]",),
    ),
    Fault(
        name="later-blocks-overwrite",
        about="A block of keys replaces the output over the blocks before it.",
        file=_ATTENTION,
        old="        if fresh:\n",
        new="        if fresh or rows.start:\n",
        tests=(f"{_EQUAL}[causal-ring]",),
    ),
    Fault(
        name="gradient-of-the-first-block-alone",
        about="Gradients of queries and keys replace those of earlier blocks.",
        file=_ATTENTION,
        old="        self._made[..., rows, :] += part\n",
        new="        self._made[..., rows, :] = part\n",
        tests=(f"{_EQUAL}[causal-gather]",),
    ),
    Fault(
        name="plan-of-another-mask",
        about="A layer plans its keys by the mask of an earlier layer.",
        file=_METHODS,
        old="plans, at = self.context.attention.plans, (*sizes, *_content_of(mask))",
        new="plans, at = self.context.attention.plans, (*sizes, mask.shape)",
        tests=("tests/parallel/context/test_planned_once.py::test_each_mask_of_a_forward_has_its_own_plan[need]",),
    ),
    Fault(
        name="attention-planned-by-every-layer",
        about="Every layer plans its messages anew.",
        file=_METHODS,
        old="        if mask is None:\n            return self.context.find(sizes, make)\n",
        new="        if mask is None:\n            return make()\n",
        tests=(
            "tests/parallel/context/test_planned_once.py::test_layers_after_the_first_one_plan_nothing[False-ring]",
        ),
    ),
    Fault(
        name="attention-chooses-by-assumed-rates",
        about="The method is chosen by assumed rates on a GPU whose rates are known.",
        file=_METHODS,
        old="choose_method(form, _memory(call.key.device), call.context.attention.rates)",
        new="choose_method(form, _memory(call.key.device))",
        tests=(f"{_TESTS}::test_attention_chooses_by_the_rates_of_its_context",),
    ),
    Fault(
        name="queries-and-keys-travel-apart",
        about="Queries and keys of the method heads are sent in two exchanges.",
        file=_METHODS,
        old="    if pairs.dtype == query.dtype:",
        new="    if pairs.dtype != query.dtype:",
        tests=(f"{_TESTS}::test_queries_keys_and_values_travel_to_the_ranks_of_their_heads_at_once",),
    ),
)
