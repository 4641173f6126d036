"""What the benchmark of uneven work says of its figures."""

from benchmarks.training.uneven_work import Measured


def test_ranks_that_meet_once_stay_within_the_limit() -> None:
    assert Measured("ZeRO 1", "1 : 2 : 4 rows", step=2.1, slowest=2.0).passed
    assert not Measured("ZeRO 1", "1 : 2 : 4 rows", step=2.2, slowest=2.0).passed
    assert Measured("ZeRO 3, gather microbatch", "1 : 2 : 4 rows", step=4.0, slowest=2.0).passed


def test_a_row_shows_both_times_and_their_ratio() -> None:
    assert str(Measured("ZeRO 1", "1 : 2 : 4 rows", step=2.1, slowest=2.0)) == (
        "| ZeRO 1 | 1 : 2 : 4 rows | 2.000 s | 2.100 s | 1.050 |"
    )
