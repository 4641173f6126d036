"""Bit digests of tensors, and findings of a check: one sentence, which all ranks raise.

Digests are wrapping integer sums, without host synchronization. A tensor's bytes are 64-bit words in runs of ``RUN``.
Its digest is the sum of each column, modulo 2^64, and the digest of the sums of the runs; a short tensor is its own:

    w0  w1  .. w15 | s0          One changed word changes its column.
    w16 w17 .. w31 | s1          Two changed words are in two columns, or in two runs, whose sums are two changed
    ---------------              words of the next level.
    c0  c1  .. c15               So any one, two or three changed words are detected.

Only four or more words at the corners of a rectangle on all levels can cancel out. Columns and runs identify the word,
and the difference of one flipped bit is a power of two that identifies the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine.kernels.device import is_host
from engine.parallel.comm.rendezvous import name_ranks
from engine.zero.state.state_inventory import StateTensor

RUN = 16
"""Words per run: few enough that column sums fit in CPU registers."""
SHORT = 1024
_AT_ONCE = 1 << 17  # words, on a CPU: 1 MiB, which stays in the cache for the second sum
_WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class FlippedPlace:
    """Position of changed bits in a tensor: one element, or the range of elements that may have changed."""

    element: int
    """Index of the changed element in the flat tensor; of the first one if several may have changed."""
    stop: int
    """End (exclusive) of the range of elements that may have changed."""
    bit: int | None
    """Index of the changed bit, 0 is the lowest; None if several changed."""


class _Change(NamedTuple):
    """Changed words."""

    word: int
    words: int
    value: int
    """Change of the word, or the sum of several changes."""


def digest_length(tensor: Tensor) -> int:
    """Returns the number of int64 words in the digest (sums over all bytes) of ``tensor``."""
    return _length(tensor.numel() // _elements_in_word(tensor))


@torch.no_grad()
def write_digest(tensor: Tensor, out: Tensor) -> None:
    """Writes the digest of ``tensor``, integer sums over all its bytes, into ``out``, int64 [digest_length(tensor)].

    A change of one, two or three 8-byte words always changes the digest.
    """
    words = _words(tensor)
    if words.device == out.device:
        _write(words, out)
        return
    there = torch.empty(out.shape, dtype=torch.int64)  # for a tensor in host memory
    _write(words, there)
    out.copy_(there)


@torch.no_grad()
def short_digest(digest: Tensor) -> Tensor:
    """Shortens ``digest`` to int64 [2]: a weighted sum of its first 16 words, and a weighted sum of all others.

    A change of one word always changes the result.
    """
    weighed = digest * odd_factors(0, len(digest), digest.device)
    return torch.stack([weighed[:RUN].sum(), weighed[RUN:].sum()])


def odd_factors(start: int, stop: int, device: torch.device) -> Tensor:
    """Returns the odd number 2 i + 1 for each i from ``start`` to ``stop`` (exclusive): int64 [stop - start]."""
    return torch.arange(start, stop, device=device).mul_(2).add_(1)


def flipped_places(difference: Sequence[int], tensor: Tensor) -> list[FlippedPlace]:
    """Returns the positions in ``tensor`` at which bits have changed; [] if nothing has changed.

    Args:
        difference: digest of the changed tensor minus digest of the original tensor, word by word.
    """
    return [_place(change, tensor) for change in _changes(difference, tensor.numel() // _elements_in_word(tensor))]


def _length(words: int) -> int:
    return words if words <= SHORT else RUN + _length(-(-words // RUN))


def _write(words: Tensor, out: Tensor) -> None:
    if len(words) <= SHORT:
        out.copy_(words)
        return
    runs, rest = divmod(len(words), RUN)
    table, columns, sums = words[: runs * RUN].view(runs, RUN), out[:RUN], words.new_empty(runs + bool(rest))
    step = _AT_ONCE // RUN if is_host(words.device) else runs
    for start in range(0, runs, step):
        part = table[start : start + step]
        torch.sum(part, dim=1, out=sums[start : start + len(part)])
        if start:
            columns.add_(part.sum(dim=0))
        else:
            torch.sum(part, dim=0, out=columns)
    if rest:
        torch.sum(words[runs * RUN :], dim=0, out=sums[runs])
        columns[:rest].add_(words[runs * RUN :])
    _write(sums, out[RUN:])


def _changes(difference: Sequence[int], words: int) -> list[_Change]:
    """Returns the changed words; whole runs if columns and runs are ambiguous."""
    if words <= SHORT:
        return [_Change(word, 1, value) for word, value in enumerate(difference) if value]
    columns = {place: value for place, value in enumerate(difference[:RUN]) if value}
    runs = _changes(difference[RUN:], -(-words // RUN))
    if not runs:
        return [_Change(0, words, value) for value in columns.values()][:1]
    if any(run.words > 1 for run in runs):
        return [_Change(run.word * RUN, run.words * RUN, run.value) for run in runs]
    if len(runs) == 1 and columns:
        return [_Change(runs[0].word * RUN + column, 1, value) for column, value in columns.items()]
    if len(columns) == 1:
        return [_Change(run.word * RUN + next(iter(columns)), 1, run.value) for run in runs]
    pairs = [(run, column) for run in runs for column, value in columns.items() if value == run.value]
    if len(pairs) == len(runs) == len(columns):
        return [_Change(run.word * RUN + column, 1, run.value) for run, column in pairs]
    return [_Change(run.word * RUN, RUN, run.value) for run in runs]


def _place(change: _Change, tensor: Tensor) -> FlippedPlace:
    """Returns the place of changed words; one flipped bit changes a word by plus or minus a power of two, modulo
    2^64."""
    size = _elements_in_word(tensor)
    amount = min(change.value % 2**64, -change.value % 2**64)
    if change.words > 1 or amount & (amount - 1):
        return FlippedPlace(change.word * size, min((change.word + change.words) * size, tensor.numel()), None)
    within, bit = divmod(amount.bit_length() - 1, 64 // size if size > 1 else 64)
    element = change.word * size + within
    return FlippedPlace(element, element + 1, bit)


def _elements_in_word(tensor: Tensor) -> int:
    """Returns the number of elements in a word: as many as fill 8 bytes if the memory is aligned, otherwise one."""
    size = tensor.element_size()
    if size > 8:
        raise ValueError(f"elements of {size} bytes have no digest")
    many = 8 // size
    aligned = tensor.is_contiguous() and tensor.numel() % many == 0 and tensor.storage_offset() % many == 0
    return many if aligned and tensor.dim() else 1


def _words(tensor: Tensor) -> Tensor:
    """Returns the memory of ``tensor`` as int64 [words]; a view, except for tensors without whole words."""
    flat = tensor.detach().reshape(-1)
    if _elements_in_word(tensor) * tensor.element_size() == 8:
        return flat.view(torch.int64)
    word = next(word for size, word in _WORDS if tensor.element_size() == size)
    return flat.contiguous().view(word).to(torch.int64)


How = Literal["rest", "copies", "rerun"]
_SHOWN = 3
"""Findings that the sentence describes; others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Report of detected corruption in one tensor: kind of check, tensor, and faulty ranks."""

    how: How
    """Kind of check. rest: changed without a write; copies: differs between ranks; rerun: two runs of a step differ."""
    kind: str
    """Kind of the tensor: "weight", "master", the name of a moment, or "gradient"."""
    name: str
    """Name of the parameter."""
    update: int
    """Number of updates at the last successful check."""
    ranks: tuple[int, ...] = ()
    """Wrong ranks; all of them if replicas differ without a majority."""
    others: tuple[int, ...] = ()
    """Ranks of the majority, with equal replicas."""
    element: int = -1
    """Index of the changed element in the rank's shard of the parameter; -1: unknown."""
    bit: int | None = None
    """Index of the flipped bit in that element; None: unknown or several."""

    @classmethod
    def at_rest(cls, held: StateTensor, place: FlippedPlace, update: int) -> "Finding":
        """Returns a report of corrupted memory: since update ``update``, the weights or optimizer state in ``held``
        have changed at ``place`` without a write.
        """
        return cls(
            how="rest",
            kind=held.kind,
            name=held.parameter(place.element),
            update=update,
            element=held.place(place.element),
            bit=place.bit,
        )

    def of(self, *ranks: int) -> "Finding":
        """Returns a copy of the report with ``ranks`` as the faulty ranks."""
        return replace(self, ranks=ranks)

    @property
    def what(self) -> str:
        """Text with kind and name of the tensor, such as "weight 'head.weight'", and element and bit if known."""
        where = f"{self.kind} {self.name!r}"
        if self.bit is not None:
            return f"bit {self.bit} of element {self.element} of {where}"
        return f"{where} around element {self.element}" if self.element >= 0 else where

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict of JSON values, for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Finding":
        """Returns the report that :meth:`to_json` has converted to ``values``."""
        return cls(**{**values, "ranks": tuple(values["ranks"]), "others": tuple(values["others"])})


def sentence(findings: Sequence[Finding], hosts: Sequence[str], reruns: bool) -> str:
    """Returns one error message about all reports in ``findings``, with advice; only the first three are described.

    Args:
        findings: at least one report.
        hosts: host name of each global rank.
        reruns: True if training steps are run twice and compared.
    """
    order: Mapping[str, int] = {"rest": 0, "rerun": 1, "copies": 2}
    found = sorted(_merged(findings), key=lambda finding: (order[finding.how], finding.ranks))
    parts = [_clause(finding, hosts) for finding in found[:_SHOWN]]
    more = f"; {len(found) - _SHOWN} further difference(s) were found" * (len(found) > _SHOWN)
    return f"silent corruption: {'; '.join(parts)}{more}. {_advice(found, reruns)}"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merges reruns: ranks of a replica feed each other, so one faulty rank changes the results of all."""
    again = [finding for finding in findings if finding.how == "rerun"]
    rest = list(dict.fromkeys(finding for finding in findings if finding.how != "rerun"))
    if not again:
        return rest
    return [*rest, again[0].of(*sorted({rank for finding in again for rank in finding.ranks}))]


def _clause(finding: Finding, hosts: Sequence[str]) -> str:
    who = name_ranks(finding.ranks, hosts)
    if finding.how == "rest":
        return f"on {who} {finding.what} has changed after update {finding.update} without a write"
    if finding.how == "rerun":
        several = len(finding.ranks) > 1
        return f"{who} computed{' each' * several} another {finding.what} when the step was run again"
    if finding.others:
        return (
            f"{who} hold{'s' * (len(finding.ranks) == 1)} {finding.what} with other bits than "
            f"{name_ranks(finding.others)}, since a step after update {finding.update}"
        )
    return (
        f"{who} hold different copies of {finding.what}, since a step after update {finding.update}, and no majority "
        "identifies the right one"
    )


def _advice(found: Sequence[Finding], reruns: bool) -> str:
    how = {finding.how for finding in found}
    resume = "The corrupted state has not been saved: resume from the last checkpoint"
    if "rest" in how:
        return f"{resume}, without that machine if it happens again."
    if "rerun" in how:
        return f"{resume}, without that machine unless its operators are not deterministic."
    if reruns:
        return f"The second run gave every rank the same result, so suspect the update or a bug. {resume}."
    return f"{resume}; integrity.rerun distinguishes a faulty machine from a bug."
