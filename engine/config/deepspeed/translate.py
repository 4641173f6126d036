"""Translation of DeepSpeed's own keys by the table in ``keys``: each is honored, noted as without effect, or
refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real as RealNumber
from typing import Any

from engine.config.deepspeed.forms import read_keywords, rewritten
from engine.config.deepspeed.keys import DERIVED, LOG, LOGS, TABLE, Feature, Moved, Noted, Only, Treatment, WithMode
from engine.config.other_engines import other_engines_word
from engine.config.reader import move
from engine.config.rules import Flag, Problems
from engine.config.wording import join_path, kind, shown_value


def translate(
    raw: Mapping[str, Any], ours: frozenset[str], problems: Problems
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translates DeepSpeed's keys in ``raw`` to Trine's. Returns the translated configuration, and notes for the user.

    Unknown keys stay in the configuration, except in sections that only DeepSpeed has; there they become problems.
    ``ours``: dotted paths of Trine's keys.
    """
    present, notes = rewritten(raw, problems)
    walk = _Walk(ours, problems)
    own = walk.section(present, "")
    read_keywords(present, problems)
    walk.apply_moves(own)
    _settle_adam(own, _uses_torch_adam(raw), problems)
    return own, (*notes, *walk.notes)


_NO_MODE = (
    "The section alone recomputes nothing, as in DeepSpeed: call torch.utils.checkpoint in the model, "
    'or add "mode": "full" to it'
)


def _has_mode(section: Mapping[str, Any]) -> bool:
    """Returns True if a section about recomputed activations asks for any."""
    return section.get("mode") in ("full", "selective", "offload")


class _Walk:
    """Pass over a raw config that removes the keys of the table."""

    def __init__(self, ours: frozenset[str], problems: Problems) -> None:
        self.notes: list[str] = []
        self._moves: list[tuple[str, str, object]] = []  # our path, their path, our value
        self._ours = ours
        self._sections = frozenset(path.rpartition(".")[0] for path in ours)
        self._theirs = frozenset(_parents(TABLE)) - self._sections
        self._problems = problems

    def section(self, raw: Mapping[str, Any], at: str) -> dict[str, Any]:
        """Returns the keys of an object that are ours."""
        ours: dict[str, Any] = {}
        for key, value in raw.items():
            path = join_path(at, key)
            if path in TABLE:
                self._treat(path, value, TABLE[path], raw)
            elif value == "auto" and path in DERIVED:
                self.notes.append(
                    f'{path}: "auto", which the Hugging Face Trainer fills in elsewhere, is {DERIVED[path]}.'
                )
            elif path in LOGS:
                self._log(path, value)
            elif isinstance(value, Mapping) and path in self._theirs:
                self.section(value, path)
            elif isinstance(value, Mapping) and path in self._sections:
                ours[key] = self.section(value, path)
            elif path in self._theirs and path not in self._ours:
                self._not_an_object(path, value)
            elif at in self._theirs:
                self._problems.unknown(at, key, _level(at))
            elif path != "$schema":
                ours[key] = value
        return ours

    def apply_moves(self, own: dict[str, Any]) -> None:
        """Writes moved values to their new keys, unless the user gave another value there."""
        for target, origin, value in self._moves:
            move(own, target, value, origin, self._problems)

    def _treat(self, path: str, value: object, treatment: Treatment, section: Mapping[str, Any]) -> None:
        match treatment:
            case Noted(reason, idle, rule):
                if not _among(value, idle) and (rule is None or rule.read(value, path, self._problems) is not None):
                    self._note(path, reason)
            case WithMode(idle, reason, target, becomes):
                if _among(value, idle):
                    return
                if target and _has_mode(section):
                    self._moves.append((target, path, becomes))
                    return
                self._note(path, reason if _has_mode(section) else f"{reason}. {_NO_MODE}")
            case Only(allowed, reason):
                if not _among(value, allowed):
                    self._problems.add(path, f"{shown_value(value)} is not supported; {reason}.")
            case Moved(target, rule, idle, becomes):
                if not _among(value, idle) and (read := rule.read(value, path, self._problems)) is not None:
                    self._moves.append((target, path, becomes if isinstance(becomes, str) else becomes.get(read, read)))
            case Feature():
                self._feature(path, value, treatment)

    def _note(self, path: str, reason: str) -> None:
        self.notes.append(f"{path}: accepted, changes nothing here; {reason}.")

    def _feature(self, path: str, value: object, feature: Feature) -> None:
        if _among(value, (None, False)):
            return
        if not isinstance(value, Mapping):
            return self._not_an_object(path, value)
        if _among(value.get(feature.switch), (*feature.off, None)):
            return
        at, given = join_path(path, feature.switch), value[feature.switch]
        if feature.keys and given is True:
            for key in [key for key in value if key != feature.switch]:
                self._treat(join_path(path, key), value[key], feature.keys.get(key, Noted(feature.reason)), value)
            return None
        if feature.passed and given is True:
            self.notes.append(
                f"{at}: accepted; engine.deepspeed passes {feature.reason} to the model's forward in training; "
                "without it, a script passes them to eng(...) itself."
            )
            return None
        if feature.noted and isinstance(given, type(feature.off[0])):
            return self._note(at, feature.reason)
        reason = "give true or false" if feature.passed else feature.reason
        self._problems.add(at, f"{shown_value(given)} is not supported; {reason}.")

    def _not_an_object(self, path: str, value: object) -> None:
        if value is None:
            return
        same = [ours for ours in self._ours if ours.rpartition(".")[2] == path.rpartition(".")[2]]
        elsewhere = other_engines_word(path)
        hint = f" Did you mean {' or '.join(sorted(same))}?" if same else f" As a size, {elsewhere}." * bool(elsewhere)
        self._problems.add(
            path,
            f"{shown_value(value)} is {kind(value)}; give DeepSpeed's section as an object, or leave {path} out.{hint}",
        )

    def _log(self, path: str, value: object) -> None:
        """Converts DeepSpeed's folder and job name to one of our logs."""
        if not isinstance(value, Mapping):
            return self._not_an_object(path, value)
        read = {}
        for key, entry in value.items():
            if key in LOG:
                read[key] = LOG[key].read(entry, f"{path}.{key}", self._problems)
            else:
                self._problems.unknown(path, key, tuple(LOG))
        if not read.get("enabled"):
            return None
        if "output_path" not in value:
            self._problems.add(f"{path}.output_path", "missing; give the folder of the log.")
        target, ending = LOGS[path]
        parts = [str(read[key]).rstrip("/") for key in ("output_path", "job_name") if read.get(key)]
        parts += ["steps"] * bool(ending and not read.get("job_name"))
        if read.get("output_path"):
            self._moves.append((target, f"{path}.output_path", "/".join(parts) + ending))
        return None


def _parents(paths: Iterable[str]) -> Iterator[str]:
    """Yields the paths of all sections around these keys; "" is the top level."""
    for path in paths:
        while path:
            path = path.rpartition(".")[0]
            yield path


def _level(at: str) -> tuple[str, ...]:
    paths = (*TABLE, *_parents(TABLE))
    return tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths if path and path.rpartition(".")[0] == at))


def _among(value: object, allowed: tuple[object, ...]) -> bool:
    """Returns True if ``value`` is one of these; 1 does not equal true."""
    if value is not None and not isinstance(value, (str, RealNumber)):
        return False
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed)


def _uses_torch_adam(raw: Mapping[str, Any]) -> bool:
    section = raw.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    return isinstance(params, Mapping) and params.get("torch_adam") is True


def _settle_adam(own: dict[str, Any], torch_adam: bool, problems: Problems) -> None:
    """Converts "Adam" to AdamW as DeepSpeed does, unless adam_w_mode is false.

    The default decay is 0, as in DeepSpeed's own Adam, or with ``torch_adam`` the decay of torch's AdamW.
    """
    section = own.get("optimizer")
    if isinstance(section, list):
        entries = [_settled_adam(each, torch_adam, f"optimizer[{i}]", problems) for i, each in enumerate(section)]
        own["optimizer"] = entries
    elif section is not None:
        own["optimizer"] = _settled_adam(section, torch_adam, "optimizer", problems)


def _settled_adam(section: Any, torch_adam: bool, at: str, problems: Problems) -> Any:
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), Mapping):
        return section
    name = section.get("type", "AdamW")
    if not isinstance(name, str) or name.lower() not in ("adam", "adamw"):
        return section
    params = dict(section.get("params", {}))
    decoupled = Flag().read(params.pop("adam_w_mode", True), f"{at}.params.adam_w_mode", problems)
    if name.lower() == "adam" and decoupled is False:
        return section
    if name.lower() == "adam" and not torch_adam:
        params = {"weight_decay": 0.0, **params}
    return {**section, "type": "AdamW", "params": params}
