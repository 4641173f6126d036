"""Rule of ``F.scaled_dot_product_attention`` over positions that context ranks share, and its four methods.

    gather    all keys to every rank (Llama 3, Dubey et al. 2024, section 3.3.2)
    need      to each rank the keys that some query there sees: windows, packed documents
    heads     each rank has all positions of some heads (DeepSpeed-Ulysses, Jacobs et al. 2023)
    ring      keys arrive from one rank after another (Liu et al. 2023)
    auto      the method with the least exposed time that fits into memory

Keys and values travel before their heads are repeated. A call that a method cannot compute gathers keys; the banner
names it. Flex attention gathers keys: its kernels skip the blocks of keys that its mask hides.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.kernels.device import total_memory
from engine.kernels.ops.flex_attention import FlexCall
from engine.parallel.context.attention import KeyAttention, attend_keys, casts_for_autocast
from engine.parallel.context.balance import runs_balance, work_balance
from engine.parallel.context.choose import ASSUMED, AttentionRates, AttentionSizes, Method, choose_method
from engine.parallel.context.cuts import contiguous
from engine.parallel.context.key_flow import KeyFlow, gathered_keys, needed_flow, own_keys, ring_of_keys
from engine.parallel.context.recipe import TensorRecipe
from engine.parallel.context.recut import recut, sent_elements, take
from engine.parallel.context.repeated_heads import before_repeat
from engine.parallel.context.rules import GivenAttention, attend_gathered, gathered_pair, mask_rows
from engine.parallel.context.sight import needed_keys
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, Rules
from engine.parallel.tensor.global_tensor.flex_parts import FlexPart
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_runs import Runs, one_run, run_length, runs_from
from engine.parallel.tensor.global_tensor.index_sets import Index, Indices, NoRuleError, Sets, replaced
from engine.parallel.tensor.global_tensor.operands import layout_of
from engine.parallel.tensor.global_tensor.rules.attention import attention_arguments, attention_rule
from engine.parallel.tensor.global_tensor.rules.flex import flex_rule, on_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

HEADS = "heads"
Made = TypeVar("Made")
_MEMORY_SHARE = 16
"""Keys of one attention may have the device's memory, divided by this number."""


class AttentionMethods:
    """Configured context-parallel attention method of a model, and record of the methods that the model's attention
    calls used: gather, need, heads or ring.

    ``asked``: configured method; "auto": one is chosen for each call. The object also caches masks and attention-call
    plans of one forward.
    """

    def __init__(self, asked: Method | Literal["auto"] = "auto", rates: AttentionRates = ASSUMED) -> None:
        self.asked, self.rates = asked, rates
        self.used: Counter[tuple[Method, str]] = Counter()
        """Number of calls by method and reason, without the figures of each call."""
        self.figures: dict[Method, str] = {}
        """Figures by which a method was first chosen."""
        self.plans: dict[Hashable, tuple[Tensor, Any]] = {}
        """Plans of calls with a mask, which is kept alive, in one forward."""
        self.rows: dict[Any, tuple[Any, Any]] = {}
        """Mask, and its rows for the queries of this rank, one copy for all layers of a forward."""

    def clear(self) -> None:
        """Drops the cached masks and attention-call plans; call it at the end of each forward."""
        self.plans.clear()
        self.rows.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the startup banner: each method with its number of calls and its reason."""
        return tuple(
            f"parallel.context: {times} attention{'s' if times > 1 else ''} by {method} "
            f"({f'auto: {self.figures[method]}' if reason == 'auto' else reason})"
            for (method, reason), times in sorted(self.used.items(), key=lambda item: -item[1])
        )


class AttendingContext(GlobalTensorContext):
    """Settings and caches for functions on global tensors (like DTensors) that are sharded along positions.
    ``method``: method of context-parallel attention on them.
    """

    def __init__(
        self, axis: TensorAxis, rules: Rules, method: Method | Literal["auto"] = "auto", rates: AttentionRates = ASSUMED
    ) -> None:
        super().__init__(axis, rules)
        self.attention = AttentionMethods(method, rates)
        self.work: Mapping[int, Indices] = {}
        """Pairs of the query at each position in packed documents of this forward, by length."""

    def uneven(self, own: Index, causal: bool) -> float:
        """Returns the largest attention work of a rank, divided by the mean of all ranks; 1 if unknown.

        ``own``: positions of the queries of each rank. The work is known for packed documents and for a causal mask.
        """
        work = self.work.get(own.size)
        if work is None and causal:
            return self.find(("causal work", own), lambda: runs_balance(own).most_over_mean)
        return 1.0 if work is None else work_balance(work, own).most_over_mean

    def clear(self) -> None:
        """Drops cached masks, attention-call plans and copies of plain tensors; call it at the end of each forward."""
        super().clear()
        self.attention.clear()


class _Call(NamedTuple):
    """Arguments of an attention that every method reads; keys have their own heads, not repeated ones."""

    context: "AttendingContext"
    given: GivenAttention
    key: GlobalTensor
    value: GlobalTensor

    @property
    def axis(self) -> TensorAxis:
        return self.context.axis

    @property
    def have(self) -> Sets:
        """Sharding of keys and values, which travel as one tensor."""
        return self.key.sets

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.key.full[:-1], self.key.full[-1] + self.value.full[-1])

    @property
    def pairs(self) -> Tensor:
        """Keys and values [.., H, K, D + E] of this rank."""
        return torch.cat((self.key.local, self.value.local), -1)

    def plan(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Returns ``make()``, once for all calls of these sizes: in a forward if the call has a mask, else for ever."""
        query, mask = self.given.query, self.given.mask
        sizes = (key, self.shape, self.have, query.full, query.sets, self.given.causal)
        if mask is None:
            return self.context.find(sizes, make)
        plans, at = self.context.attention.plans, (*sizes, *_content_of(mask))
        if at not in plans:
            plans[at] = mask, make()
        made: Made = plans[at][1]
        return made

    @property
    def needed(self) -> Index | None:
        """Keys that each rank needs; None: unknown on other ranks, or before the mask has values."""
        own, keys, given = self.given.query.sets[-2], self.key.full[-2], self.given
        assert own is not None, "the caller has checked it"
        return self.plan("needed keys", lambda: needed_keys(own, keys, given.causal, given.mask))


def context_attention(context: "AttendingContext", func: Function, *args: Any, **options: Any) -> Any:
    """Computes ``func``, torch's ``scaled_dot_product_attention``, with its arguments ``args`` and ``options``.

    Tensors are [.., heads, S, D] with positions S sharded over axis cp.

    The method of ``context`` moves keys and values between ranks; if it does not support the call, they are
    all-gathered. The result is sharded as the queries.

    Raises:
        NoRuleError: another dim than S is sharded, or keys and values are sharded differently.
    """
    query, key, value, mask, options = attention_arguments(args, options)
    mask = mask.kept() if type(mask) is TensorRecipe else mask
    own, theirs = layout_of(query).sets, layout_of(key).sets
    if own[-2] is None and theirs[-2] is None:
        return attention_rule(context, func, query, key, value, mask, **options)
    if type(query) is not GlobalTensor:
        raise NoRuleError("queries that no rank shards have no rule over sharded keys.")
    if any(own[:-2]) or any(theirs[:-2]) or own[-1] is not None or layout_of(value).sets != theirs:
        raise NoRuleError("attention needs full heads, and keys and values that are sharded equally.")
    causal = bool(options.pop("is_causal", False))
    given = GivenAttention(query, key, value, mask, causal, options)
    problem = _only_gathered(given)
    if problem or type(key) is not GlobalTensor or type(value) is not GlobalTensor:
        context.attention.used["gather", problem] += 1
        return attend_gathered(context, func, given)
    call = _Call(context, given, before_repeat(key), before_repeat(value))
    if call.key.full[:-1] != call.value.full[:-1] or query.full[-3] % call.key.full[-3]:
        call = _Call(context, given, key, value)
    method, reason = call.plan(("method", call.given.query.dtype), lambda: _method(call))
    context.attention.used[method, reason] += 1
    return _METHODS[method](call)


def context_flex(context: "AttendingContext", func: Function, q: Tensor, k: Tensor, v: Tensor, call: FlexCall) -> Any:
    """Computes flex attention on [B, heads, S, D] with positions S sharded over axis cp; gathers keys and values.

    Raises:
        NoRuleError: another dim is sharded, or keys and values are sharded differently.
    """
    own, theirs = layout_of(q).sets, layout_of(k).sets
    if own[-2] is None and theirs[-2] is None:
        return flex_rule(context, func, q, k, v, call)
    if type(q) is not GlobalTensor:
        raise NoRuleError("queries that no rank shards have no rule over sharded keys.")
    if any(own[:-2]) or any(theirs[:-2]) or own[-1] is not None or layout_of(v).sets != theirs:
        raise NoRuleError("attention needs full heads, and keys and values that are sharded equally.")
    context.attention.used["gather", "flex attention"] += 1
    keys, values = gathered_pair(k, v)
    if own[-2] is not None:
        call = _on_positions(context, own[-2], call, q.device)
    made = func(q.local, keys, values, call)
    return on_ranks(context, made, (*q.full[:-1], v.shape[-1]), q.sets)


def _on_positions(context: "AttendingContext", own: Index, call: FlexCall, device: torch.device) -> FlexCall:
    """Returns the call for the queries of this rank; their part of a mask is made once for all layers of a forward."""
    runs, rows = own.runs[context.axis.index], context.attention.rows
    part = context.find(("flex part", own, device), lambda: FlexPart.of(device, queries=runs))
    key = (id(call.block_mask), own)
    if key not in rows:
        rows[key] = call.block_mask, part.mask(call.block_mask)
    return part.call(call, rows[key][1])


def _only_gathered(given: GivenAttention) -> str:
    """Returns the reason why only gathered keys can be used; empty if there is none."""
    query, key, value = given.query, given.key, given.value
    if any(type(each.local) is GlobalTensor for each in (query, key, value) if type(each) is GlobalTensor):
        return "heads are global tensors over tp"
    if query.sets[-2] is None or layout_of(key).sets[-2] is None:
        return "queries or keys are full on every rank"
    if given.options.get("dropout_p"):
        return "attention dropout"
    if given.mask is not None and given.mask.requires_grad:
        return "a mask with a gradient"
    one = len({query.dtype, key.dtype, value.dtype}) == 1 or casts_for_autocast(query.local)
    leading = query.ndim > 2 and query.shape[:-3] == key.shape[:-3] and key.shape[:-2] == value.shape[:-2]
    if not leading or not one or (query.shape[-3] != key.shape[-3] and not given.options.get("enable_gqa")):
        return "operands that broadcast"
    return "" if given.mask is None or given.mask.ndim <= query.ndim else "a mask with more dims"


def _method(call: _Call) -> tuple[Method, str]:
    """Returns the method of a call and the reason."""
    asked = call.context.attention.asked
    if asked == "auto":
        form = _form(call)
        method, reason = choose_method(form, _memory(call.key.device), call.context.attention.rates)
        unknown = "" if form.sent is not None else "; need where a mask hides enough keys"
        call.context.attention.figures.setdefault(method, f"{reason}{unknown}")
        return method, "auto"
    if asked == "need" and call.needed is None and type(call.given.mask) is not GlobalTensor:
        return "gather", "at most: training sends the keys that its masks show"  # a run on shapes
    problem = _PROBLEMS.get(asked, _nothing)(call)
    return ("gather", f"not {asked}: {problem}") if problem else (asked, "configured")


def _form(call: _Call) -> AttentionSizes:
    query, needed, ranks = call.given.query, call.needed, call.axis.size
    own, sent, most = query.sets[-2], None, None
    assert own is not None, "the caller has checked it"
    if needed is not None:
        wanted = replaced(call.have, len(call.have) - 2, needed)
        sent = max(sent_elements(call.shape, call.have, wanted, ranks))
        most = max(map(run_length, needed.runs))
    heads = 0 if type(call.given.mask) is GlobalTensor else query.full[-3]
    return AttentionSizes(
        ranks=ranks, rows=query.full[:-3].numel(), queries=query.full[-2], keys=call.shape[-2], heads=heads or 1,
        key_heads=call.shape[-3], width=call.shape[-1], element=call.key.local.element_size(),
        causal=call.given.causal, sent=sent, needed=most, uneven=call.context.uneven(own, call.given.causal),
    )  # fmt: skip


def _memory(device: torch.device) -> int | None:
    """Returns the most bytes for the keys of one attention; None: no limit is known."""
    memory = total_memory(device)
    return None if memory is None else memory // _MEMORY_SHARE


def _nothing(call: _Call) -> str:
    return ""


def _no_need(call: _Call) -> str:
    return "" if call.needed is not None else "the rows of the mask are sharded"


def _no_heads(call: _Call) -> str:
    heads, ranks = call.given.query.full[-3], call.axis.size
    if type(call.given.mask) is GlobalTensor:
        return "the rows of the mask are sharded"
    return f"{heads} heads do not divide among {ranks} ranks" if heads % ranks else ""


_PROBLEMS: dict[str, Callable[[_Call], str]] = {"need": _no_need, "heads": _no_heads}


# ---- methods


def _over(call: _Call, flow: KeyFlow) -> GlobalTensor:
    """Returns attention of this rank's queries over the keys of ``flow``."""
    context, given, own = call.context, call.given, call.given.query.sets[-2]
    assert own is not None, "the caller has checked it"
    attention = KeyAttention(own.runs[call.axis.index], flow, given.causal, _scale(given))
    out = attend_keys(given.query.local, call.pairs, _rows(call, own), attention)
    return GlobalTensor(out, (*given.query.full[:-1], call.value.full[-1]), given.query.sets, context)


def _content_of(mask: Tensor) -> tuple[int, int]:
    """Returns a key of a mask's content, which code may write in place between two attentions."""
    held: Tensor | None = mask
    while held is not None and type(held) is not Tensor:
        held = held.local if type(held) is GlobalTensor else None
    return id(mask), 0 if held is None or held.is_inference() else held._version


def _rows(call: _Call, own: Index) -> Tensor | None:
    """Returns the rows of the mask for the queries of this rank."""
    mask, rows = call.given.mask, call.context.attention.rows
    if mask is None:
        return None
    key = (*_content_of(mask), own)
    if key not in rows:
        rows[key] = mask, mask_rows(call.context, mask, own)
    made: Tensor = rows[key][1]
    return made


def _scale(given: GivenAttention) -> float:
    scale = given.options.get("scale")
    return float(given.query.full[-1] ** -0.5 if scale is None else scale)


def _gather(call: _Call) -> GlobalTensor:
    return _over(call, call.plan("gathered keys", lambda: gathered_keys(call.shape, call.have, call.axis)))


def _ring(call: _Call) -> GlobalTensor:
    return _over(call, call.plan("ring of keys", lambda: ring_of_keys(call.shape, call.have, call.axis)))


def _need(call: _Call) -> GlobalTensor:
    needed = call.needed
    assert needed is not None, "the caller has checked it"
    return _over(call, call.plan("flow of needed keys", lambda: needed_flow(call.shape, call.have, needed, call.axis)))


def _heads(call: _Call) -> GlobalTensor:
    context, given = call.context, call.given
    query = given.query
    plan = call.plan("heads", lambda: _HeadPlan.of(call))
    pairs = GlobalTensor(call.pairs, call.shape, call.have, context)
    if pairs.dtype == query.dtype:
        sharded, served = recut((query, pairs), (plan.shares, plan.served), HEADS)
    else:
        (sharded,), (served,) = recut((query,), (plan.shares,), HEADS), recut((pairs,), (plan.served,), HEADS)
    queries, both = sharded.local, served.local
    if plan.one_each is not None:
        both = both.index_select(-3, torch.as_tensor(plan.one_each, device=both.device))
    mask = given.mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        mask = take(mask, (*(None,) * (mask.ndim - 3), plan.own, None, None))
    attention = KeyAttention(one_run(0, query.full[-2]), plan.flow, given.causal, _scale(given))
    out = attend_keys(queries, both, mask, attention)
    made = GlobalTensor(out, (*query.full[:-1], call.value.full[-1]), plan.shares, context)
    return recut((made,), (query.sets,), HEADS)[0]


class _HeadPlan(NamedTuple):
    """Heads of each rank under the method "heads"."""

    shares: Sets
    """Sharding of the queries."""
    served: Sets
    """Sharding of the keys that the queries of a rank read."""
    own: Runs
    """Query heads of this rank."""
    one_each: Indices | None
    """Key head of each query head of this rank; None if equally many neighbouring query heads read each key head."""
    flow: KeyFlow

    @staticmethod
    def of(call: _Call) -> "_HeadPlan":
        """Plans a call."""
        query, rank = call.given.query, call.axis.index
        times, shares = query.full[-3] // call.key.full[-3], contiguous(query.full[-3], call.axis.size)
        served = Index.of_runs((runs_from(np.unique(held // times)) for held in shares.ranks), call.key.full[-3])
        heads, keys = shares.ranks[rank] // times - served.ranks[rank][0], served.counts[rank]
        even = len(heads) % keys == 0 and np.array_equal(heads, np.arange(len(heads)) * keys // len(heads))
        flow = own_keys(call.shape[-2], call.axis)
        by_heads = partial(_by_heads, query)
        return _HeadPlan(by_heads(shares), by_heads(served), shares.runs[rank], None if even else heads, flow)


def _by_heads(x: GlobalTensor, heads: Index) -> Sets:
    return (*(None,) * (x.ndim - 3), heads, None, None)


_METHODS: dict[Method, Callable[[_Call], GlobalTensor]] = {
    "gather": _gather, "need": _need, "heads": _heads, "ring": _ring,
}  # fmt: skip
