"""Faults of earlier keys, of time-outs that follow from each other, and of versions of hosts."""

from tests.faults.fault import Fault

_CONFIG = "tests/engine/config/test_config.py"
_ARGUMENTS = "tests/engine/huggingface/test_arguments.py"

KEYS_AND_VERSIONS = (
    Fault(
        name="half-of-an-earlier-key",
        about="A key whose two effects have keys of their own now sets the first of them alone.",
        file="engine/config/reader.py",
        old="return lambda value: dict.fromkeys(keys, value)",
        new="return lambda value: dict.fromkeys(keys[:1], value)",
        tests=(f"{_CONFIG}::test_an_earlier_key_sets_those_of_today_unless_they_contradict_it",),
    ),
    Fault(
        name="an-earlier-key-without-a-note",
        about="Nobody is told that a key has another name now.",
        file="engine/config/__init__.py",
        old="notes=(*remarks(raw), *old, *notes, *passed)",
        new="notes=(*remarks(raw), *notes, *passed)",
        tests=(f"{_CONFIG}::test_an_earlier_key_sets_those_of_today_unless_they_contradict_it",),
    ),
    Fault(
        name="watchdog-after-the-collective",
        about="The watchdog waits as long as a collective, which gives up without a word on the rank to blame.",
        file="parallel/comm/world.py",
        old="return float(given) if given else timeout_seconds(configured) / 2",
        new="return float(given or timeout_seconds(configured))",
        tests=("tests/parallel/comm/test_world.py::test_the_watchdog_acts_before_a_collective_gives_up",),
    ),
    Fault(
        name="an-empty-list-of-rates-is-accepted",
        about="A schedule takes a list without a rate, and comparing its rates fails without a sentence.",
        file="engine/config/rules.py",
        old="if len(value) < self.least:",
        new="if False:",
        tests=("tests/engine/config/test_between.py::test_params_that_contradict_each_other_are_refused",),
    ),
    Fault(
        name="every-other-version-is-refused",
        about="A later version of a library shuts the door to its loop.",
        file="engine/hosting/__init__.py",
        old="if _minor(found)[0] < _minor(first)[0]:",
        new="if not _minor(first) <= _minor(found) <= _minor(last):",
        tests=(f"{_ARGUMENTS}::test_another_minor_version_warns_once",),
    ),
)
