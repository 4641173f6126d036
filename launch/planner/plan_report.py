"""Report of ``trine plan``: memory by kind, bytes by axis, seconds, rates, price, verdict; as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.launch.planner.plan_request import PlanAsked
from engine.planning.cost_model.estimate import LayoutEstimate, RankMemory
from engine.planning.cost_model.links import placement_picture
from engine.planning.cost_model.search import USABLE, SearchResult, changes

if TYPE_CHECKING:
    from engine.parallel.context.balance import WorkBalance
    from engine.planning.plan import Plan
    from engine.planning.step_time.expert_traffic import ExpertTraffic
    from engine.planning.step_time.plan_costs import PlanCosts

GIB = 2**30
PICTURED = 16
"""Maximum number of nodes drawn individually."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Plan of one layout (parallel sizes, ZeRO stage, microbatches) with estimates of memory and time."""

    asked: PlanAsked
    plan: "Plan"
    costs: "PlanCosts"
    counted: str
    """Method by which activations were counted; empty: estimates of the cost model."""
    settings: dict[str, Any]
    """Proposed configuration, if the user passed none."""
    fits: bool
    change: LayoutEstimate | None
    """Nearest layout that fits in memory, if the planned one does not; otherwise None."""
    smallest: LayoutEstimate | None
    """Layout with the least memory, if the planned one does not fit."""
    passed: tuple["PlanCosts", ...] = ()
    """Layouts that were counted earlier and do not fit in memory."""


def as_text(planned: Planned) -> str:
    """Formats ``planned`` for the terminal: the startup banner of a run, memory and step time."""
    from engine.reporting.banner import banner_text

    lines = [banner_text(planned.plan, "no device: a plan")]
    lines += [f"  {name:<10} {text}" for name, text in _cost_lines(planned)]
    return "\n".join(lines)


def _cost_lines(planned: Planned) -> Iterator[tuple[str, str]]:
    asked, costs, gpu = planned.asked, planned.costs, planned.asked.gpu
    yield "planned", asked.model.words
    yield "gpu", f"{asked.world} x {gpu.name}, {asked.node} a node"
    if gpu.reached_of:
        yield (
            "rates",
            (
                f"the fractions of the data sheet that training reaches are from {gpu.reached_of}, not measured on "
                "this kind of GPU; trine plan --calibrate FILE measures them"
            ),
        )
    if asked.world <= PICTURED * asked.node and asked.world > asked.node:
        picture = placement_picture(planned.plan.grid(0), asked.node)
        yield "placement", picture.replace("\n", "\n" + 13 * " ")
    if costs.experts is not None:
        yield "exchange", expert_text(costs.experts)
    if costs.balance is not None:
        yield "balance", balance_text(costs.balance)
    fullest = max(range(len(costs.memory)), key=lambda pp: costs.memory[pp].total)
    for pp in sorted({0, fullest}):
        where = f"pipeline rank {pp}: " if len(costs.memory) > 1 else ""
        yield "memory", f"{where}{_memory_text(costs.memory[pp])}"
    if planned.counted:
        yield "counted", planned.counted
    if planned.passed:
        tried = "; ".join(f"{one.layout}: {one.fullest.total / GIB:.1f} GiB" for one in planned.passed)
        yield "passed", f"{len(planned.passed)} that fit in closed form but not once counted: {tried}"
    parts: dict[str, float] = {"computation": costs.time.computation, "bubble": costs.time.bubble}
    parts |= {axis: seconds for axis, seconds in costs.time.communication.items()}
    shown = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds >= 5e-4 * costs.time.total)
    yield "step", f"{costs.time.total:.3g} s predicted ({shown}); closed form {costs.closed.seconds.total:.3g} s"
    yield (
        "speed",
        (
            f"{costs.tokens_per_second:,.0f} tokens/s a GPU, {costs.flops_per_second / 1e12:.3g} TFLOP/s, "
            f"MFU {costs.flops_per_second / gpu.bf16_rate:.1%} of {gpu.bf16_rate / 1e12:.4g} TFLOP/s (dense)"
        ),
    )
    if asked.dollars is not None:
        yield "price", f"${_price(planned):,.2f} for a billion tokens at ${asked.dollars:g} per GPU hour"
    if costs.crossing_seconds:
        yield (
            "warning",
            (
                f"tensor groups of {costs.layout.tp} cross nodes of {asked.node} GPUs, which costs "
                f"{costs.crossing_seconds:.3g} s of every step"
            ),
        )
    yield "fits", _verdict(planned)


def balance_text(balance: "WorkBalance") -> str:
    """Formats ``balance``, the attention work of each context rank, as a sentence with the maximum and its ratio to the
    mean.
    """
    return (
        f"a context rank computes at most {max(balance.pairs):,} pairs of a query and a key in a head and row, "
        f"{balance.most_over_mean:.4f} times the mean of {len(balance.pairs)} ranks, under a causal mask"
    )


def expert_text(traffic: "ExpertTraffic") -> str:
    """Formats the bytes that a rank sends for expert parallelism in a step, and the number of experts per rank."""
    places = "; ".join(_places(experts, bounds) for experts, bounds in traffic.placement)
    return (
        f"ep sends {traffic.expected / GIB:.2f} GiB a rank and step on average for even routing, at most "
        f"{traffic.most / GIB:.2f} for any; a round takes at most {traffic.round / GIB:.2f} GiB; {places}"
    )


def _places(experts: int, bounds: Sequence[int]) -> str:
    """Describes the experts of each rank: ranges if these are unequal."""
    ranks = len(bounds) - 1
    if experts % ranks == 0:
        return f"{experts} experts: {experts // ranks} on each of {ranks} ranks, in order"
    held = ", ".join(f"{first}-{stop - 1}" if stop - first > 1 else f"{first}" for first, stop in pairwise(bounds))
    return f"{experts} experts on {ranks} ranks: {held}"


def _memory_text(memory: RankMemory) -> str:
    kinds = ", ".join(f"{name} {value / GIB:.2f}" for name, value in memory_kinds(memory).items() if value)
    return f"{memory.total / GIB:.2f} GiB ({kinds})"


def memory_kinds(memory: RankMemory) -> dict[str, float]:
    """Returns the planned bytes of a rank by kind, such as "parameters" or "activations"."""
    return {entry.name: getattr(memory, entry.name) for entry in fields(memory)}


def _price(planned: Planned) -> float:
    return (planned.asked.dollars or 0.0) / 3600 * 1e9 / planned.costs.tokens_per_second


def _verdict(planned: Planned) -> str:
    need, have = planned.costs.fullest.total / GIB, planned.asked.gpu.memory_bytes / GIB
    if planned.fits:
        return f"yes: {need:.1f} of {have:.1f} GiB"
    text = f"no: {need:.1f} of {have:.1f} GiB"
    if planned.passed:
        text += f"; nor does any other of the {len(planned.passed) + 1} layouts that were counted"
    if planned.change is None:
        if planned.passed:
            return text
        least = planned.smallest.memory.total / GIB if planned.smallest else 0.0
        offload, room = offload_text(planned.smallest), room_text(planned.asked.gpu.memory_bytes)
        return f"{text}; no layout on these GPUs does, the smallest needs {least:.1f} GiB{offload}, and {room}"
    before, after = planned.costs.layout, planned.change.layout
    steps = ", ".join(
        f"{name} {setting_text(name, old)} -> {setting_text(name, new)}"
        for name, (old, new) in changes(before, after).items()
    )
    cost = f"{planned.change.memory.total / GIB:.1f} GiB, {planned.change.seconds.total:.3g} s"
    return f"{text}; the nearest that does{' by estimate' * bool(planned.passed)}: {steps} ({cost})"


def setting_text(name: str, value: Any) -> str:
    """Formats the setting ``name`` of a layout for a sentence, such as ``dp4 x tp2 x pp1`` for "grid"."""
    match name, value:
        case "grid", (dp, cp, tp, pp, ep):
            return f"dp{dp}{f' x cp{cp}' if cp > 1 else ''} x tp{tp} x pp{pp}{f' (ep{ep})' if ep > 1 else ''}"
        case "microbatches", (micro, count):
            return f"{count} of {micro} row{'s' * (micro != 1)}"
        case "schedule", (kind, virtual):
            return f"{kind} of {virtual} stages a rank" if virtual > 1 else str(kind)
        case "zero", (stage, reduction):
            return f"{stage}{' of every microbatch' * (stage >= 2 and reduction == 'microbatch')}"
    return str(value)


def offload_text(smallest: LayoutEstimate | None) -> str:
    """Returns a clause with the GPU memory that the layout ``smallest`` needs with offloaded optimizer state; "" for
    None.
    """
    if smallest is None:
        return ""
    left = (smallest.memory.total - smallest.memory.optimizer) / GIB
    return f', and {left:.1f} with zero_optimization.offload_optimizer {{"device": "cpu"}}'


def room_text(memory_bytes: float) -> str:
    """Returns a clause like "a layout may fill 75.2 of 80.0 GiB (6% is left free)" for a GPU with ``memory_bytes``."""
    room, whole = USABLE * memory_bytes / GIB, memory_bytes / GIB
    return f"a layout may fill {room:.1f} of {whole:.1f} GiB ({1 - USABLE:.0%} is left free)"


def as_json(planned: Planned) -> dict[str, Any]:
    """Returns the plan as a JSON object; memory in bytes, times in seconds."""
    costs, asked = planned.costs, planned.asked
    plan = planned.plan
    traffic = plan.rank(0).traffic
    first_ranks = [plan.rank(plan.grid(0).rank_at(pp=pp)) for pp in range(plan.config.pp)]
    found: dict[str, Any] = {
        "model": asked.model.words,
        "gpu": asked.gpu.name,
        "world": asked.world,
        "gpus_of_a_node": asked.node,
        "layout": str(costs.layout),
        "memory_bytes": [{**memory_kinds(rank), "total": rank.total} for rank in costs.memory],
        "counted": planned.counted,
        "passed": [{"layout": str(one.layout), "memory_bytes": one.fullest.total} for one in planned.passed],
        "host_memory_bytes": [sum(rank.host_bytes.values()) for rank in first_ranks],
        "disk_bytes": [rank.disk_bytes for rank in first_ranks],
        "gpu_memory_bytes": asked.gpu.memory_bytes,
        "fits": planned.fits,
        "sent_bytes": [
            {"axis": row.axis, "what": row.label, "calls": row.calls, "bytes": row.bytes} for row in traffic
        ],
        "step_seconds": costs.time.total,
        "seconds": {
            "computation": costs.time.computation, "bubble": costs.time.bubble, **costs.time.communication,
        },
        "closed_form_seconds": costs.closed.seconds.total,
        "tokens_per_second_of_a_gpu": costs.tokens_per_second,
        "flops_per_second": costs.flops_per_second,
        "mfu": costs.flops_per_second / asked.gpu.bf16_rate,
        "crossing_seconds": costs.crossing_seconds,
    }  # fmt: skip
    if costs.experts is not None:
        found["experts"] = {
            "expected_bytes": costs.experts.expected, "most_bytes": costs.experts.most,
            "round_bytes": costs.experts.round, "first_experts": dict(costs.experts.placement),
        }  # fmt: skip
    if costs.balance is not None:
        found["context_work"] = {"pairs": list(costs.balance.pairs), "most_over_mean": costs.balance.most_over_mean}
    if asked.dollars is not None:
        found["dollars_per_billion_tokens"] = _price(planned)
    if planned.change is not None:
        found["nearest_that_fits"] = {
            name: {"from": old, "to": new} for name, (old, new) in changes(costs.layout, planned.change.layout).items()
        }
    if planned.settings:
        found["config"] = planned.settings
    return found


def search_text(found: SearchResult, planned: Sequence[Planned]) -> str:
    """Formats the result of a layout search: a summary, a line per layout in ``planned``, and reasons why the
    first layout is the best.
    """
    lines = [f"model: {planned[0].asked.model.words}"]
    lines += [f"{found.tried:,} layouts of {found.grids} grids in closed form, whole plans of {len(planned)}"]
    for one in planned:
        costs = one.costs
        fits = ("" if one.fits else ", does not fit") + ", counted" * bool(one.counted)
        lines.append(
            f"  {costs.time.total:8.3f} s  MFU {costs.flops_per_second / one.asked.gpu.bf16_rate:5.1%}  "
            f"{costs.fullest.total / GIB:6.1f} GiB  {costs.layout}{fits}"
        )
    return "\n".join([*lines, "why", *(f"  {line}" for line in _reasons(found, planned))])


def _reasons(found: SearchResult, planned: Sequence[Planned]) -> Iterator[str]:
    """Yields three lines about the first place: its time by part, the loss of the next grid, the number that fit."""
    best = planned[0].costs
    parts = _parts(best)
    shown = ", ".join(
        f"{name} {seconds / best.time.total:.0%}"
        for name, seconds in sorted(parts.items(), key=lambda pair: -pair[1])
        if seconds >= 0.005 * best.time.total
    )
    yield f"{best.time.total:.3g} s a step, of which {shown}; it fills {best.fullest.total / GIB:.1f} GiB of a GPU"
    other = next((one.costs for one in planned if one.fits and one.costs.layout.grid != best.layout.grid), None)
    if other is None:
        yield "no plan of another grid was made that fits"
    else:
        lost = {name: seconds - parts.get(name, 0.0) for name, seconds in _parts(other).items()}
        worst = max(lost, key=lambda name: lost[name])
        slower = other.time.total / best.time.total - 1
        yield f"the next grid is {slower:.1%} slower: {other.layout}; it spends {lost[worst]:+.3g} s on {worst}"
    yield f"{len(found.ranked):,} of {found.tried:,} layouts of {found.grids} grids fit in closed form"


def _parts(costs: "PlanCosts") -> dict[str, float]:
    axes = {f"{axis} traffic": seconds for axis, seconds in costs.time.communication.items()}
    return {"computation": costs.time.computation, "bubble": costs.time.bubble, **axes}
