"""The table of seeded faults: its data fit the product, and (long) each fault is noticed by its tests."""

import ast
from functools import cache

import pytest

from tests.faults import __main__ as command
from tests.faults.catalogue import AREAS, FAULTS
from tests.faults.fault import ROOT, Fault, functions_of
from tests.faults.trial import Outcome, judge

SAMPLE = Fault(name="a", about="It hangs.", file="zero/layout.py", old="", new="", tests=())
SILENT = Fault(name="a", about="It is wrong.", file="zero/layout.py", old="", new="", tests=())


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a product file; many faults change the same file."""
    return ast.parse(text)


def code_around(tree: ast.AST, first: int, last: int) -> str:
    """Return the code, without its layout, of the innermost statement with a body around some lines."""
    for node in getattr(tree, "body", ()):
        if hasattr(node, "body") and node.lineno <= first and last <= node.end_lineno:
            return code_around(node, first, last)
    return ast.dump(tree)


@pytest.mark.parametrize("area", AREAS)
def test_faults_fit_their_files(area: str) -> None:
    for fault in AREAS[area]:
        before, after = (ROOT / fault.file).read_text(encoding="utf-8"), fault.patched()
        assert before != after, fault.name
        if fault.file.endswith(".py"):
            first = before[: before.index(fault.old)].count("\n") + 1
            lines = [first + text.rstrip("\n").count("\n") for text in (fault.old, fault.new)]
            old, new = (
                code_around(tree, first, last)
                for tree, last in zip((parsed(before), ast.parse(after)), lines, strict=True)
            )
            assert old != new, f"{fault.name} is other code"
        assert (ROOT / fault.file).resolve() == ROOT / fault.file, f"{fault.name} names its file by its real path"


@pytest.mark.parametrize("area", AREAS)
def test_the_tests_of_faults_exist_and_run_by_default(area: str) -> None:
    for fault in AREAS[area]:
        assert fault.tests and fault.known_tests() == fault.tests, fault.name
        for test in fault.tests:
            file, _, function = test.partition("::")
            for name, node in functions_of(ROOT / file).items():
                if name == function.partition("[")[0]:
                    marks = map(ast.unparse, node.decorator_list)
                    assert not any(mark.startswith("pytest.mark.long") for mark in marks), fault.name


def test_there_are_enough_faults_and_none_twice() -> None:
    assert len(FAULTS) >= 60 and all(len(area) >= 6 for area in AREAS.values())
    assert len({fault.name for fault in FAULTS}) == len({fault.about for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert not [fault.name for fault in FAULTS if "|" in fault.about or not fault.about.endswith(".")]


@pytest.mark.parametrize(
    ("fault", "code", "said", "outcome", "killer"),
    [
        (SILENT, 0, "1 passed", Outcome.SURVIVED, "all of its tests pass"),
        (SILENT, 1, "FAILED tests/a.py::test_b[x] - assert 1 == 2", Outcome.KILLED, "tests/a.py::test_b"),
        (SILENT, 1, "FAILED tests/a.py::test_b - RankError: ranks [1] did not end within 120 s", Outcome.BROKEN, ""),
        (SAMPLE, 1, "FAILED tests/a.py::test_b - RankError: ranks [1] did not end within 120 s", Outcome.KILLED, ""),
        (SILENT, None, "", Outcome.BROKEN, "by time limit"),
        (SAMPLE, None, "", Outcome.KILLED, "by time limit"),
        (SILENT, 2, "ERROR tests/a.py - ImportError\n1 error during collection", Outcome.BROKEN, ""),
        (SILENT, 5, "no tests ran", Outcome.BROKEN, ""),
    ],
)
def test_only_a_failed_test_kills_and_a_time_limit_what_hangs(
    fault: Fault, code: int | None, said: str, outcome: Outcome, killer: str
) -> None:
    verdict = judge(fault, code, said, 1.0)
    assert verdict.outcome is outcome and killer in verdict.killer
    assert verdict.reason == ("assert 1 == 2" if outcome is Outcome.KILLED and fault is SILENT else "")


def test_a_fault_that_cannot_be_seeded_says_so() -> None:
    with pytest.raises(LookupError, match="occurs 0 times in zero/none"):
        Fault(name="a", about="", file="zero/none.py", old="x", new="", tests=()).patched()


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_fault_is_noticed() -> None:
    assert command.main([]) == 0
