"""The table of what checks cost."""

from benchmarks.training.integrity import EVERY, Spent, cells_of


def test_cells_compare_with_no_checks() -> None:
    seconds = {0: 2.0, 1: 2.2, 10: 2.1, 100: 2.0}
    spent = {every: [Spent(seconds[every] + more, 0.02) for more in (-0.5, 0.0, 9.0)] for every in EVERY}
    cells = cells_of(spent, 1024)
    assert cells["1,024", "step without, CPU s"] == "2.000"
    assert cells["1,024", "every 1"] == "+10.0 %, checks alone 2.00 %"
    assert cells["1,024", "every 100"].startswith("+0.0 %")
