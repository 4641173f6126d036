"""What a check has found, and the one sentence that all ranks raise of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from engine.integrity.digest import FlippedPlace
from engine.parallel.comm.meeting import name_ranks
from engine.zero.phases.state_inventory import StateTensor

How = Literal["rest", "copies", "rerun"]
_SHOWN = 3
"""Findings that are put into words; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be; the same on all ranks once it is exchanged."""

    how: How
    """rest: changed without a write; copies: differs between ranks; rerun: computed otherwise the second time."""
    kind: str
    """What it is: "weight", "master", the name of a moment, or "gradient"."""
    name: str
    """The parameter."""
    update: int
    """Updates that had been made when the state was last known to be right."""
    ranks: tuple[int, ...] = ()
    """The ranks to blame; if copies differ and no majority tells which one is wrong, all of them."""
    others: tuple[int, ...] = ()
    """The ranks whose copies are equal and in the majority."""
    element: int = -1
    """Index of the changed element in the rank's part of the parameter; -1: unknown."""
    bit: int | None = None
    """The one flipped bit of that element."""

    @classmethod
    def at_rest(cls, held: StateTensor, place: FlippedPlace, update: int) -> "Finding":
        """A change between two updates."""
        return cls(
            how="rest",
            kind=held.kind,
            name=held.parameter(place.element),
            update=update,
            element=held.place(place.element),
            bit=place.bit,
        )

    def of(self, *ranks: int) -> "Finding":
        """The same, with the ranks to blame."""
        return replace(self, ranks=ranks)

    @property
    def what(self) -> str:
        """The tensor in words, such as "weight 'head.weight'"."""
        where = f"{self.kind} {self.name!r}"
        if self.bit is not None:
            return f"bit {self.bit} of element {self.element} of {where}"
        return f"{where} around element {self.element}" if self.element >= 0 else where

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the other ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Finding":
        """The finding of another rank."""
        return cls(**{**values, "ranks": tuple(values["ranks"]), "others": tuple(values["others"])})


def sentence(findings: Sequence[Finding], hosts: Sequence[str], reruns: bool) -> str:
    """All findings in one sentence, the certain ones first.

    Args:
        findings: at least one.
        hosts: the host of each rank.
        reruns: the step was run again, and each rank compared what it computed.
    """
    order: Mapping[str, int] = {"rest": 0, "rerun": 1, "copies": 2}
    found = sorted(_merged(findings), key=lambda finding: (order[finding.how], finding.ranks))
    parts = [_clause(finding, hosts) for finding in found[:_SHOWN]]
    more = f"; {len(found) - _SHOWN} further difference(s) were found" * (len(found) > _SHOWN)
    return f"silent corruption: {'; '.join(parts)}{more}. {_advice(found, reruns)}"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Ranks of one replica that all computed otherwise are one finding: each is fed by the others."""
    again = [finding for finding in findings if finding.how == "rerun"]
    rest = list(dict.fromkeys(finding for finding in findings if finding.how != "rerun"))
    if not again:
        return rest
    return [*rest, again[0].of(*sorted({rank for finding in again for rank in finding.ranks}))]


def _clause(finding: Finding, hosts: Sequence[str]) -> str:
    who = name_ranks(finding.ranks, hosts)
    if finding.how == "rest":
        return f"on {who} {finding.what} has changed after update {finding.update}, and nothing has written it"
    if finding.how == "rerun":
        several = len(finding.ranks) > 1
        return f"{who} computed{' each' * several} another {finding.what} when the step was run again"
    if finding.others:
        return (
            f"{who} hold{'s' * (len(finding.ranks) == 1)} {finding.what} otherwise than {name_ranks(finding.others)}, "
            f"since a step after update {finding.update}"
        )
    return (
        f"{who} hold different copies of {finding.what}, since a step after update {finding.update}, and no majority "
        "tells which is right"
    )


def _advice(found: Sequence[Finding], reruns: bool) -> str:
    how = {finding.how for finding in found}
    resume = "Nothing of it has been saved: resume from the last checkpoint"
    if "rest" in how:
        return f"{resume}, without that machine if it happens again."
    if "rerun" in how:
        return f"{resume}, without that machine unless its operators are not deterministic."
    if reruns:
        return f"The step run again gave every rank the same, so suspect the update or a bug. {resume}."
    return f"{resume}; integrity.rerun tells a machine that computes wrongly from a bug."
