"""What the benchmark of rounds says of its figures."""

from benchmarks.training.matrix_rounds import Spent


def test_the_ratio_is_that_of_overlapping_rounds() -> None:
    spent = Spent(exchange=0.2, apart=0.4, together=0.3, rounds=4)
    assert spent.ratio == 0.75
    assert str(spent) == (
        "4 rounds, exchange 0.200 s, products as long: one after another 0.400 s, overlapping 0.300 s, ratio 0.75; "
        "limit 0.95"
    )
