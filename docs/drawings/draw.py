"""Draw the pictures of the documents: ``python docs/drawings/draw.py`` writes the SVG files next to this script.

Ranks come from the grid, schedules from the simulator and bytes from the rule that plans use, so a picture follows the
code.
"""

import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]

from canvas import Canvas  # noqa: E402

from engine.parallel.comm.traffic import sent_bytes  # noqa: E402
from engine.parallel.grid import Grid  # noqa: E402
from engine.parallel.pipeline.schedule.kinds import make_schedule  # noqa: E402
from engine.parallel.pipeline.schedule.simulate import Cost, simulate  # noqa: E402


def grid() -> Canvas:
    """Return 32 ranks on 8 nodes, with one group of each axis."""
    canvas = Canvas(
        "32 ranks on 8 nodes: pipeline 4 x data 2 x tensor 4",
        446,
        "Eight nodes of four GPUs in two rows and four columns; a column is a pipeline stage, a row a replica.",
    )
    ranks = Grid(pp=4, dp=2, tp=4)
    left, top, wide, high, step, down = 112, 96, 150, 98, 170, 138
    for stage in range(4):
        canvas.text(left + step * stage + wide / 2, 62, f"stage {stage}", "bold t-pipe", "middle")
    for replica in range(2):
        y = top + down * replica
        canvas.text(20, y + 42, f"replica {replica}", "bold t-data")
        canvas.text(20, y + 60, "dp " + str(replica), "small muted")
        for stage in range(4):
            x = left + step * stage
            canvas.box(x, y, wide, high, "card", 8)
            node = ranks.rank_at(pp=stage, dp=replica, tp=0) // 4
            canvas.text(x + wide - 10, y + 19, f"node {node}", "small muted", "end")
            chosen = stage == 1 and replica == 1
            for tensor in range(4):
                rank = ranks.rank_at(pp=stage, dp=replica, tp=tensor)
                kind = "tensor" if chosen else "white"
                kind = "data" if stage == 2 and tensor == 2 else kind
                kind = "pipe" if replica == 0 and tensor == 0 else kind
                canvas.label(x + 9 + 33.5 * tensor, y + 32, 31, 30, str(rank), "small", kind)
                canvas.text(x + 24.5 + 33.5 * tensor, y + 79, f"tp{tensor}", "small muted", "middle")
    y = top + 47
    for stage in range(3):
        x = left + step * stage
        canvas.path(f"M{x + 24} {y - 15}V{y - 63}H{x + step + 24}V{y - 17}", "l-pipe", both=True)
    x = left + 2 * step + 9 + 33.5 * 2 + 15.5
    canvas.path(f"M{x} {top + 86}V{top + down + 31}", "l-data", both=True)
    x = left + step
    canvas.path(f"M{x + 10} {top + down + 89}H{x + 140}", "l-tensor", both=True)
    return _grid_legend(canvas)


def _grid_legend(canvas: Canvas) -> Canvas:
    y = 364
    rows = (
        ("tensor", "tensor group, ranks 12 to 15", "activations, several times in every layer", "21.75 GiB"),
        ("pipe", "pipeline group, ranks 0, 8, 16, 24", "activations at the cut, once a microbatch", "512 MiB"),
        ("data", "data group, ranks 18 and 22", "gradients and parameters, once a step", "468 MiB"),
    )
    canvas.text(704, y - 8, "rank 0 sends", "small muted", "end")
    for number, (kind, group, content, size) in enumerate(rows):
        line = y + 26 * number
        canvas.box(20, line - 2, 18, 18, kind, 3)
        canvas.text(48, line + 12, group, f"t-{kind} bold")
        canvas.text(318, line + 12, content)
        canvas.text(704, line + 12, size, "mono", "end")
        canvas.text(714, line + 12, "a step", "small muted")
    return canvas


def column_row() -> Canvas:
    """Return a column and a row layer on two tensor ranks."""
    canvas = Canvas(
        "A column layer and a row layer on two tensor ranks",
        454,
        "Each rank holds half the columns of the first weight and half the rows of the second; one all-reduce forward.",
    )
    for rank, y in enumerate((70, 226)):
        half = ("first", "second")[rank]
        canvas.box(14, y - 18, 772, 122, "card", 8)
        canvas.text(383, y + 1, f"tensor rank {rank}", "bold", "middle")
        canvas.label(26, y + 24, 82, 52, "x|whole", "", "white")
        canvas.path(f"M108 {y + 50}H150")
        canvas.label(152, y + 16, 150, 68, f"column layer|{half} half of A|[h, 4h/2]", "", "tensor")
        canvas.path(f"M302 {y + 50}H326")
        canvas.label(328, y + 24, 110, 52, "gelu(xA)|half as wide", "", "white")
        canvas.path(f"M438 {y + 50}H462")
        canvas.label(464, y + 16, 150, 68, f"row layer|{half} half of B|[4h/2, h]", "", "other")
        canvas.path(f"M614 {y + 50}H640")
        canvas.label(642, y + 24, 62, 52, "partial|sum", "", "white")
        canvas.path(f"M704 {y + 50}H724")
        canvas.label(726, y + 24, 52, 52, "y|whole", "", "white")
    canvas.path("M673 147V249", "l-tensor", both=True)
    canvas.text(664, 188, "all-reduce of y", "t-tensor bold small", "end")
    canvas.text(664, 203, "in the forward", "t-tensor small", "end")
    canvas.path("M67 147V249", "l-tensor dash", both=True)
    canvas.text(78, 188, "all-reduce of the gradient of x", "t-tensor bold small")
    canvas.text(78, 203, "in the backward", "t-tensor small")
    size = 12 * 128 * 128 * 4
    sent = sent_bytes("all_reduce", size)
    lines = (
        "Between the two layers nothing is sent: each rank's columns of xA are the columns that its rows of B need.",
        f"In train.py y is 12 rows x 128 tokens x 128 wide in fp32: {size:,} bytes. In each all-reduce a rank sends",
        f"2 (t-1)/t of that, {sent:,} bytes for t = 2. A block has two such pairs, attention and MLP.",
        "With sequence parallelism a reduce-scatter takes the place of the all-reduce of y, and an all-gather",
        "precedes the column layer: the same bytes, and x and y are cut along the sequence between the pairs.",
    )
    for number, line in enumerate(lines):
        canvas.text(20, 360 + 19 * number, line, "" if number == 0 else "muted")
    return canvas


def zero3() -> Canvas:
    """Return one microbatch at ZeRO 3: gathers run one group ahead, reductions follow the backward."""
    canvas = Canvas(
        "A ZeRO 3 step of one microbatch, on one of the data ranks",
        410,
        "While a group computes, the next one is gathered; in the backward gradients are reduce-scattered.",
    )
    groups, left, unit = ("emb", "b0", "b1", "head"), 112, 36.0
    lanes = {"gather": 74, "compute": 122, "reduce": 170}
    for name, y in lanes.items():
        canvas.text(20, y + 20, name, "bold")
    canvas.text(20, lanes["compute"] + 36, "the GPU", "small muted")
    t = 1.0  # no computation runs during the first gather
    starts: list[tuple[str, float, float]] = []
    _bar(canvas, lanes["gather"], left, 0, unit, groups[0], "data")
    for k, group in enumerate(groups):
        _bar(canvas, lanes["compute"], left + unit * t, 0, unit * 1.3, f"F {group}", "pipe")
        if k + 1 < len(groups):
            _bar(canvas, lanes["gather"], left + unit * t, 0, unit, groups[k + 1], "data")
        starts.append((group, t, 1.3))
        t += 1.3
    turn = t
    back: list[tuple[str, float, float]] = []
    for k in reversed(range(len(groups))):
        _bar(canvas, lanes["compute"], left + unit * t, 0, unit * 2.2, f"B {groups[k]}", "other")
        if k:
            _bar(canvas, lanes["gather"], left + unit * t, 0, unit, groups[k - 1], "data")
        back.append((groups[k], t, 2.2))
        t += 2.2
        _bar(canvas, lanes["reduce"], left + unit * t, 0, unit * 1.0, groups[k], "weight")
    _bar(canvas, lanes["reduce"], left + unit * (t + 1), 0, unit * 1.05, "norm", "white")
    _bar(canvas, lanes["compute"], left + unit * (t + 2.05), 0, unit * 1.3, "update", "tensor")
    x = left + unit * turn
    canvas.path(f"M{x:g} 60V340", "thin dash", head=False)
    canvas.text(x, 54, "loss", "small muted", "middle")
    return _whole_groups(canvas, groups, starts, back, (left, unit))


def _bar(canvas: Canvas, y: float, x: float, shift: float, width: float, words: str, kind: str) -> None:
    canvas.box(x + shift + 1, y, width - 2, 30, kind, 3)
    canvas.text(x + shift + width / 2, y + 20, words, "small", "middle")


def _whole_groups(
    canvas: Canvas,
    groups: tuple[str, ...],
    forward: list[tuple[str, float, float]],
    backward: list[tuple[str, float, float]],
    scale: tuple[float, float],
) -> Canvas:
    """Draw when each group is whole: from the start of its gather to the entry of the next group."""
    left, unit = scale
    canvas.text(20, 240, "whole", "bold")
    for row, group in enumerate(groups):
        y = 224 + 28 * row
        canvas.text(left - 8, y + 15, group, "small", "end")
        spans = []
        for k, (name, start, length) in enumerate(forward):
            if name == group:
                begin = forward[k - 1][1] if k else 0.0
                spans.append((begin, start + length))
        for k, (name, start, length) in enumerate(backward):
            if name == group:
                spans.append((backward[k - 1][1] if k else start, start + length))
        for first, second in list(pairwise(spans)):
            if first[1] >= second[0]:
                spans = [(first[0], second[1])]
        canvas.box(left, y, unit * 18.35, 20, "idle", 3)
        for begin, end in spans:
            canvas.box(left + unit * begin, y, unit * (end - begin), 20, "data", 3)
    gathers, layers = 2 * len(groups) - 1, len(groups)
    lines = (
        f"{gathers} gathers and {layers} reduce-scatters for {layers} groups: the head stays whole where "
        "the forward turns to the backward.",
        "At most two groups are whole at a time. Between steps a rank keeps 1/N of the parameters and of the optimizer",
        'state, and with "reduce": "microbatch" 1/N of the gradients at all times. Lengths are schematic.',
    )
    for row, line in enumerate(lines):
        canvas.text(20, (362, 383, 400)[row], line, "muted" if row else "")
    return canvas


def schedules() -> Canvas:
    """Return 1F1B next to ZB-V, both simulated on one scale."""
    ranks, microbatches = 4, 8
    ours = [
        ("1f1b", make_schedule("1f1b", ranks, microbatches), "one stage a rank"),
        ("zb-v", make_schedule("zb-v", ranks, microbatches, 2), "two stages a rank, backwards in two parts"),
    ]
    lines = [(name, simulate(made, Cost().shared(ranks, made.stages)), note) for name, made, note in ours]
    canvas = Canvas(
        "1F1B and ZB-V on four ranks, eight microbatches, one scale of time",
        420,
        "A row a rank, a box an action of one microbatch; the empty background is idle time.",
    )
    left, room = 76, 706
    scale = room / max(line.makespan for _, line, _ in lines)
    for panel, (name, line, note) in enumerate(lines):
        top = 62 + 160 * panel
        words = f"{name}: {note}; step {line.makespan:g}, {100 * line.bubble:.1f}% idle"
        canvas.text(20, top, words, "bold")
        size = "small" if line.schedule.stages == len(line.spans) else "tiny"
        for rank, spans in enumerate(line.spans):
            y = top + 12 + 29 * rank
            canvas.text(20, y + 17, f"rank {rank}", "small muted")
            canvas.box(left, y, scale * line.makespan, 25, "idle", 2)
            for action, begin, end in spans:
                kind = {"F": "tensor", "B": "pipe", "I": "pipe", "W": "data"}[action.op.value]
                second = action.stage != min(line.schedule.stages_of_rank[rank])
                canvas.box(left + scale * begin + 0.5, y + 1, scale * (end - begin) - 1, 23, kind, 2)
                x = left + scale * (begin + end) / 2
                words = str(action.microbatch)
                canvas.text(x, y + 16.5, words, f"{size} muted" if second else f"{size} bold", "middle")
    x = 20.0
    for kind, words, width in (
        ("tensor", "F forward", 98), ("pipe", "B backward, or its input gradient alone", 268),
        ("data", "W weight gradient", 148), ("idle", "idle", 60),
    ):  # fmt: skip
        canvas.box(x, 374, 16, 16, kind, 3)
        canvas.text(x + 22, 387, words, "small")
        x += width
    canvas.text(20, 408, "Numbers are microbatches; in zb-v bold is the first stage of a rank, light the second. "
                         "Backward takes twice the forward.", "small muted")  # fmt: skip
    return canvas


def checkpoint() -> Canvas:
    """Return a moment of one parameter, written by two tensor ranks and read by three data ranks."""
    canvas = Canvas(
        "A checkpoint of tensor 2 x pipeline 2, read by four data ranks with ZeRO 3",
        406,
        "Tensor ranks 0 and 1 wrote rows 0 to 255 and 256 to 511 of a moment; data ranks read the elements they own.",
    )
    canvas.text(20, 54, "one of its tensors: exp_avg of blocks.0.up.weight, 512 x 128 in fp32", "muted")
    canvas.text(100, 84, "written by", "bold", "middle")
    canvas.text(400, 84, "step-00000250/", "bold mono", "middle")
    canvas.text(710, 84, "read by", "bold", "middle")
    ranks = Grid(pp=2, dp=1, tp=2)
    for rank in range(4):
        place, y = ranks.coord(rank), 98 + 58 * rank
        kind = ("tensor", "pipe")[rank] if rank < 2 else "white"
        canvas.label(20, y, 160, 46, f"rank {rank}|pp {place.pp}, tp {place.tp}", "small", kind)
    canvas.box(262, 96, 276, 232, "card", 8)
    for number, (y, kind, rows) in enumerate(((136, "tensor", "0-255"), (194, "pipe", "256-511"))):
        words = f"optim/optim-0000{number}.safetensors|rows {rows}, 32,768 elements"
        canvas.label(276, y - 24, 248, 46, words, "small", kind)
    canvas.text(290, 246, "optim/optim-00002, optim-00003: stage 1", "small muted")
    canvas.text(290, 268, "model/: whole tensors (Hugging Face)", "small muted")
    canvas.text(290, 290, "manifest.json: which rows are in which file", "small muted")
    canvas.text(290, 312, "COMMIT: written last, hash of the manifest", "small muted")
    canvas.path("M180 121C225 121 230 134 272 134", "l-tensor")
    canvas.path("M180 179C225 179 230 192 272 192", "l-pipe")
    canvas.path("M180 237C225 237 230 242 280 242", "thin", head=False)
    canvas.path("M180 295C225 295 230 246 280 246", "thin", head=False)
    return _readers(canvas)


def _readers(canvas: Canvas) -> Canvas:
    """Draw the elements of the parameter that each of four data ranks owns in the bucket of its block."""
    shares = READ_SHARES
    for rank, (start, stop) in enumerate(shares):
        y = 98 + 60 * rank
        words = f"elements {start:,}|to {stop - 1:,}" if stop > start else "reads other|parameters"
        canvas.label(640, y, 140, 52, f"data rank {rank}|{words}", "small", "white" if stop > start else "card")
        for file, (middle, kind) in enumerate(((134, "l-tensor"), (192, "l-pipe"))):
            if start < (file + 1) * 32768 and stop > file * 32768:
                canvas.path(f"M528 {middle}C585 {middle} 585 {y + 26} 636 {y + 26}", kind)
    lines = (
        "Each rank reads the byte ranges that it needs and checks the hash of every block. Nothing is converted.",
        "Element 128 r + c is row r, column c. At ZeRO 3 each rank owns a quarter of the bucket of blocks.0.",
    )
    for number, line in enumerate(lines):
        canvas.text(20, 366 + 22 * number, line, "" if number == 0 else "muted")
    return canvas


READ_SHARES: tuple[tuple[int, int], ...] = ((0, 0), (0, 33664), (33664, 65536), (0, 0))
"""Elements of blocks.0.up.weight in the shards of four data ranks: its bucket has 198,400, and it begins at 65,536."""


def batch() -> Canvas:
    """Return the path of a batch on data 2 x pipeline 2 x tensor 2."""
    canvas = Canvas(
        "The path of a batch: pipeline 2 x data 2 x tensor 2, 16 rows in microbatches of 4",
        500,
        "Rows go to replicas, microbatches through stages, gradients into buckets, and one update ends the step.",
    )
    canvas.label(20, 56, 130, 60, "global batch|16 rows", "bold", "white")
    ranks = Grid(pp=2, dp=2, tp=2)
    for replica in range(2):
        y = 56 + 150 * replica
        rows = "rows 0-7" if replica == 0 else "rows 8-15"
        canvas.path(f"M150 86H168V{y + 64}H188" if replica else f"M150 86H168V{y + 50}H188", "l-data")
        canvas.box(190, y, 592, 132, "card", 8)
        canvas.text(202, y + 18, f"replica {replica}: {rows}, two microbatches of 4 rows", "bold t-data")
        for stage in range(2):
            x = 214 + 300 * stage
            canvas.box(x, y + 30, 234, 90, "white", 6)
            first, second = (ranks.rank_at(pp=stage, dp=replica, tp=tensor) for tensor in range(2))
            canvas.text(x + 117, y + 48, f"stage {stage}: ranks {first} and {second}", "small muted", "middle")
            canvas.label(x + 12, y + 56, 100, 52, "tensor rank 0|same rows", "small", "tensor")
            canvas.label(x + 122, y + 56, 100, 52, "tensor rank 1|same rows", "small", "tensor")
        canvas.path(f"M448 {y + 66}H512", "l-pipe")
        canvas.text(480, y + 58, "values", "small t-pipe", "middle")
        canvas.path(f"M512 {y + 92}H450", "l-pipe dash")
        canvas.text(481, y + 108, "gradients", "small t-pipe", "middle")
    steps = (
        ("last backward", "gradients are summed|in flat buckets", "pipe"),
        ("reduce-scatter", "full buckets, while the|backward still runs", "data"),
        ("one all-reduce", "loss, weight, norm:|clip, update or skip", "other"),
        ("update", "each rank: its shard|of the optimizer state", "tensor"),
        ("all-gather", "new parameters|(ZeRO 1 and 2)", "data"),
    )
    for number, (head, words, kind) in enumerate(steps):
        x = 20 + 155 * number
        canvas.box(x, 376, 140, 78, kind, 6)
        canvas.text(x + 70, 397, head, "bold", "middle")
        for row, line in enumerate(words.split("|")):
            canvas.text(x + 70, 419 + 17 * row, line, "small", "middle")
        if number:
            canvas.path(f"M{x - 15} 415H{x - 2}")
    canvas.path("M230 338V356H90V374")
    canvas.text(240, 361, "on every rank", "small muted")
    words = "Both tensor ranks of a stage read the same rows. The report of the step is equal on all ranks."
    canvas.text(20, 482, words, "muted")
    return canvas


LAYERS = {
    "STAGE": ("a stage without it answers", "pipe"),
    "GATHER": ("parameters are gathered, and freed after it", "data"),
    "RANDOM": ("random generators are reseeded", "card"),
    "RECOMPUTE": ("runs again in the backward", "other"),
    "ROWS": ("positions of this rank", "data"),
    "COUNT": ("rows of experts are counted", "card"),
    "EXPERTS": ("rows go to their experts' ranks", "data"),
    "FP32": ("inputs are cast to fp32", "card"),
    "COMPILE": ("torch.compile", "card"),
    "DEFERRED": ("weight gradient may wait", "pipe"),
    "LAZY": ("logits wait for the loss", "card"),
    "FUSED": ("activation in the product", "card"),
    "TENSOR": ("layer of a tensor rank", "tensor"),
    "KERNEL": ("fused operator", "card"),
}
"""Layer of a patch, from outside to inside -> its effect and colour."""


def patches() -> Canvas:
    """Return the layers around the forward of a module, each inside the one before."""
    from engine.parallel.model.forward_patch import PatchLayer

    order = [layer.name for layer in sorted(PatchLayer, reverse=True) if layer is not PatchLayer.PARAMETERS]
    assert order == list(LAYERS), "the picture shows every layer"
    canvas = Canvas(
        "The layers of a call of a module, from outside to inside",
        492,
        "Nested boxes: the call enters at the outermost layer that is in use and ends in the module's own forward.",
    )
    for number, (name, (words, kind)) in enumerate(LAYERS.items()):
        x, y = 20 + 22 * number, 46 + 25 * number
        canvas.box(x, y, 760 - 30 * number, 430 - 30 * number, kind, 6)
        canvas.text(x + 12, y + 17, name, "mono bold")
        canvas.text(x + 104, y + 17, words, "small")
    x, y = 20 + 22 * len(LAYERS), 46 + 25 * len(LAYERS)
    canvas.label(x, y + 2, 760 - 30 * len(LAYERS), 32, "the forward that you wrote", "bold", "white")
    return canvas


SERIES = (
    ("average", r"average, period (\d+)", "data"),
    ("DiLoCo: lr 0.7, Nesterov 0.9", r"diloco, period (\d+)", "pipe"),
    ("DiLoCo in fewer bits", r"diloco, period \d+, (int\d)", "tensor"),
    ("the largest 3 %", r"average, period \d+, top 3 %(?:, )?(.*)", "other"),
)
"""Lines and points of the outer loop: words, pattern of the rows in the figure, colour."""


def outer() -> Canvas:
    """Return loss against pushed bytes, from the figure of ``python -m benchmarks outer``."""
    canvas = Canvas(
        "Validation loss of four sites against the bytes that a site pushes",
        470,
        "Longer periods push fewer bytes at a higher loss; sparse pushes with feedback need the fewest for their loss.",
    )
    rows = json.loads((FOLDER.parent / "figures" / "outer.json").read_text(encoding="utf-8"))["rows"]
    points = {name: (int(row["bytes of a site"].replace(",", "")), float(row["loss"])) for name, row in rows.items()}
    left, right, top, bottom = 70.0, 770.0, 60.0, 370.0
    least, most = (math.log10(pick(size for size, _ in points.values())) for pick in (min, max))
    low, high = (pick(loss for _, loss in points.values()) for pick in (min, max))
    low, high, least, most = low - 0.06, high + 0.03, least - 0.25, most + 0.12

    def place(size: float, loss: float) -> tuple[float, float]:
        x = left + (math.log10(size) - least) / (most - least) * (right - left)
        return round(x, 1), round(bottom - (loss - low) / (high - low) * (bottom - top), 1)

    for tenth in range(math.ceil(low * 10), math.floor(high * 10) + 1):
        _, y = place(10**least, tenth / 10)
        canvas.path(f"M{left} {y}H{right}", "thin dash", head=False)
        canvas.text(left - 8, y + 4, f"{tenth / 10:.1f}", "small muted", "end")
    for power in range(math.ceil(least), math.floor(most) + 1):
        x, _ = place(10**power, low)
        canvas.path(f"M{x} {bottom}V{bottom + 6}", "thin", head=False)
        canvas.text(x, bottom + 20, f"{10**power / 1e6:g} MB", "small muted", "middle")
    canvas.path(f"M{left} {top}V{bottom}H{right}", "line", head=False)
    canvas.text(left - 8, top - 8, "loss", "small bold", "end")
    synchronous = place(*points["synchronous, period 1"])
    for number, (title, pattern, kind) in enumerate(SERIES):
        found = {hit[1]: place(*point) for name, point in points.items() if (hit := re.fullmatch(pattern, name))}
        is_line = number < 2
        if is_line:
            line = "L".join(f"{x} {y}" for x, y in sorted((synchronous, *found.values())))
            canvas.path(f"M{line}", f"l-{kind}", head=False)
        for label, (x, y) in found.items():
            words = label or "no feedback"
            is_left = not is_line and x - 7 * len(words) > left
            canvas.box(x - 4, y - 4, 8, 8, f"h-{kind}", 4)
            shift = (-8, 4) if is_left else (0, 17 if number == 0 else -9)
            canvas.text(x + shift[0], y + shift[1], words, f"tiny t-{kind}", "end" if is_left else "middle")
        canvas.box(20 + 195 * number, 422, 10, 10, f"h-{kind}", 5)
        canvas.text(36 + 195 * number, 431, title, f"small t-{kind}")
    x, y = synchronous
    canvas.box(x - 5, y - 5, 10, 10, "h-line", 5)
    canvas.text(right, y + 20, "synchronous", "tiny bold", "end")
    words = "Numbers at the points are periods in steps. The sparse forms and their dense counterpart meet 60 times."
    canvas.text(20, 456, words, "small muted")
    return canvas


DRAWINGS = (grid, column_row, zero3, schedules, checkpoint, batch, patches, outer)


def main() -> None:
    """Write every picture."""
    for draw in DRAWINGS:
        draw().save(FOLDER / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
