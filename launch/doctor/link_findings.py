"""What measured links lack, against what is known of them and against each other. Pure."""

from collections.abc import Iterator
from statistics import median

from engine.launch.doctor.examined import AxisFigure, Examined, Hosts, PairFigure
from engine.parallel.comm.meeting import name_ranks

_SLOW = 0.5
"""Of the speed that an interface tells, or of the median of the other pairs."""
_ROUGH = 0.1
"""Of what is expected within a host, which is a rough figure."""


def link_findings(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, str]]:
    """(kind, sentence)."""
    yield from _wide_tensor(seen, hosts)
    yield from _slow_axes(seen)
    yield from _slowest_pair(seen.pairs)


def in_megabytes(rate: float) -> str:
    """Bytes a second as text."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e10 else f"{rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s"


def _wide_tensor(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, str]]:
    wide = [figure for figure in seen.axes if figure.axis == "tp" and len(figure.hosts) > 1]
    if wide:
        most = min(len(ranks) for ranks in hosts.ranks.values())
        yield (
            "axis",
            f"tensor {name_ranks(wide[0].ranks)} are on several hosts ({', '.join(wide[0].hosts)}), and tensor "
            f"parallelism waits for the network in every layer; give parallel.tensor a divisor of {most}, the number "
            "of ranks of a host.",
        )


def _slow_axes(seen: Examined) -> Iterator[tuple[str, str]]:
    """The slowest group of each axis, if it is slow."""
    for axis in dict.fromkeys(figure.axis for figure in seen.axes):
        slowest = min((figure for figure in seen.axes if figure.axis == axis), key=_share)
        if slowest.expected_rate and _share(slowest) < (_SLOW if len(slowest.hosts) > 1 else _ROUGH):
            yield (
                "axis",
                f"{axis} over {name_ranks(slowest.ranks)} sends {in_megabytes(slowest.rate)} of the "
                f"{in_megabytes(slowest.expected_rate)} that {slowest.over} should carry; look for other traffic, a "
                "slower link between, or busy processors.",
            )


def _share(figure: AxisFigure) -> float:
    return figure.rate / figure.expected_rate if figure.expected_rate else float("inf")


def _slowest_pair(pairs: tuple[PairFigure, ...]) -> Iterator[tuple[str, str]]:
    """Against the other pairs, or against the speed of the interface if there is only one."""
    if not pairs:
        return
    slowest = min(pairs, key=lambda pair: pair.rate)
    others = [pair.rate for pair in pairs if pair is not slowest]
    usual = median(others) if others else slowest.expected_rate
    if usual is None or slowest.rate >= _SLOW * usual:
        return
    first, second = slowest.hosts
    if not others:
        told = f"{in_megabytes(slowest.rate)} of the {in_megabytes(usual)} that their interfaces should carry"
        yield "pair", f"{first} and {second} send each other {told}; look at the link between them."
        return
    yield (
        "pair",
        f"{first} - {second} is the slowest pair of hosts: {in_megabytes(slowest.rate)}, and the median of the other "
        f"pairs is {in_megabytes(usual)}{_common(slowest, pairs)}.",
    )


def _common(slowest: PairFigure, pairs: tuple[PairFigure, ...]) -> str:
    """The host of the slowest pair whose other pairs are all slow, too; most often its link is to blame."""
    fastest = max(pair.rate for pair in pairs)
    for host in slowest.hosts:
        own = [pair.rate for pair in pairs if host in pair.hosts]
        if len(pairs) > len(own) > 1 and max(own) < _SLOW * fastest:
            return f"; all pairs with {host} are slow (at most {in_megabytes(max(own))}), so look at its link"
    return ""
