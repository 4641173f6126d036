"""Events of a store as JSON objects: every change of its state is one of them.

    start join layout seed push merge offer taken lost back leave

A field "kind" names the event. Numbers of lives, ranks, fragments and versions are integers; hashes are texts.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from engine.checkpoint.format.checked_blocks import DEFAULT_ALGORITHM, hash_function
from engine.checkpoint.format.pieces import Part, Piece
from engine.outer.messages import JoinRequest, NamedPiece, PushKey, PushMeta, PushShare, RankLayout, StoreRefusedError
from engine.outer.store.placement import Flats

Event = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def hash_of(flats: Flats) -> str:
    """Returns the hashes of all tensors in ``flats`` as one text, 16 hexadecimal digits each."""
    function = hash_function(DEFAULT_ALGORITHM)
    arrays = (values.detach().flatten().view(torch.uint8).numpy() for values in flats)
    return "".join(f"{function(array.data):016x}" for array in arrays)


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``values`` after a round trip through JSON: tuples become lists, and keys become strings."""
    found: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return found


def check_shared(request: JoinRequest, ours: Mapping[str, Any]) -> None:
    """Refuses a training site with settings that differ from ``ours``, the store's settings.

    Raises:
        StoreRefusedError: names the first setting that differs.
    """
    if (other := _other_setting(json_values(request.settings), ours)) is not None:
        name, theirs, own = other
        raise StoreRefusedError(
            f'site {request.site} has "{name}" {theirs!r} and the store {own!r}, but both share all settings of the '
            "outer loop; start both with the same configuration.",
            409,
        )


def check_model(site: int, model: Event, known: Event) -> None:
    """Refuses training site number ``site`` if its model differs from the first site's.

    Compares tensors, parameter groups, and frozen parameters and buffers. Does not compare a frozen value that has
    different dtypes on the two sites.

    Args:
        model: model of this site, a result of ``model_record``.
        known: model of the first site, a result of ``model_record``.

    Raises:
        StoreRefusedError: the records differ; the message names the first difference.
    """
    for name in ("tensors", "groups", "group_of"):
        if model[name] != known[name]:
            raise StoreRefusedError(
                f"site {site} has other {name.replace('_', ' ')} than the sites before it, "
                f"{_first_difference(model[name], known[name])}; start all sites with the same model and optimizer.",
                409,
            )
    for name, known_value in known.get("untrained", {}).items():
        value = model["untrained"].get(name, known_value)
        if value != known_value and value.split()[0] == known_value.split()[0]:
            raise StoreRefusedError(
                f"site {site} has other values of {name!r} than the sites before it, and sites never exchange frozen "
                "parameters and buffers; start all sites from the same ones.",
                409,
            )


def _other_setting(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the dotted name and both values of the first setting that differs; None if all are equal."""
    for name in sorted({*theirs, *ours}):
        one, other = theirs.get(name), ours.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if (inner := _other_setting(one, other)) is not None:
                return f"{name}.{inner[0]}", *inner[1:]
        elif one != other:
            return name, one, other
    return None


def _first_difference(theirs: Sequence[Any], ours: Sequence[Any]) -> str:
    """Returns the position and the values of the first difference of two lists, in words."""
    at = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    named = [repr(values[at]) if at < len(values) else "nothing" for values in (theirs, ours)]
    return f"at number {at} {named[0]} instead of {named[1]}"


def model_record(request: JoinRequest) -> dict[str, Any]:
    """Returns the request's tensors, parameter groups and digests of frozen values, as JSON values by name."""
    groups, untrained = [dict(group) for group in request.groups], dict(request.untrained)
    return json_values(
        {"tensors": request.tensors, "groups": groups, "group_of": request.group_of, "untrained": untrained}
    )


def push_record(meta: PushMeta, rank: int, share: PushShare, body_hash: str, finite: bool) -> dict[str, Any]:
    """Returns a "push" event for the store's journal: one rank's part of a push.

    Args:
        meta: description of the push.
        share: loss and loss weight of the rank.
        body_hash: hash of the rank's encoded values.
        finite: True if all values are finite.
    """
    return {
        "kind": "push", "life": meta.key.life, "fragment": meta.key.fragment, "seq": meta.key.seq, "base": meta.base,
        "steps": meta.steps, "tokens": meta.tokens, "rows": meta.rows, "step": meta.step, "rates": list(meta.rates),
        "taken": [list(pair) for pair in meta.taken], "rank": rank, "weight": share.weight, "loss": share.loss,
        "hash": body_hash, "finite": finite,
    }  # fmt: skip


def read_meta(event: Event) -> PushMeta:
    """Returns the description of a push from a "push" event of the store's journal."""
    return PushMeta(
        key=read_key(event), base=event["base"], steps=event["steps"], tokens=event["tokens"], rows=event["rows"],
        step=event["step"], rates=tuple(event["rates"]), taken=tuple((at, version) for at, version in event["taken"]),
    )  # fmt: skip


def read_key(event: Event) -> PushKey:
    """Returns the identity of a push from a "push" event of the store's journal."""
    return PushKey(event["life"], event["fragment"], event["seq"])


def layout_record(life: int, rank: int, layout: RankLayout) -> dict[str, Any]:
    """Returns a "layout" event for the store's journal: the elements that one rank pushes and pulls in the run
    ``life``.
    """
    pushed, pulled = _pieces(layout.pushed), _pieces(layout.pulled)
    return {"kind": "layout", "life": life, "rank": rank, "pushed": pushed, "pulled": pulled}


def read_layout(event: Event, shapes: Shapes) -> RankLayout:
    """Returns the elements that one rank pushes and pulls, from a "layout" event of the store's journal.

    Args:
        shapes: shape of each trainable tensor by name.
    """
    return RankLayout(_read_pieces(event["pushed"], shapes), _read_pieces(event["pulled"], shapes))


def _pieces(pieces: Iterable[NamedPiece]) -> list[list[Any]]:
    return [
        [
            each.name,
            each.piece.start,
            each.piece.stop,
            each.piece.part.dim,
            [list(run) for run in each.piece.part.rows],
            None if each.piece.part.outer is None else list(each.piece.part.outer),
        ]
        for each in pieces
    ]


def _read_pieces(rows: Sequence[Sequence[Any]], shapes: Shapes) -> tuple[NamedPiece, ...]:
    found = []
    for name, start, stop, dim, runs, outer in rows:
        part = Part(shapes[name], dim, tuple((a, b) for a, b in runs), None if outer is None else (outer[0], outer[1]))
        found.append(NamedPiece(name, Piece(part, start, stop)))
    return tuple(found)
