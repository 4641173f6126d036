"""What the benchmark of rounds says of its figures."""

from benchmarks.training.matrix_rounds import Spent


def test_the_ratio_is_that_of_overlapping_rounds() -> None:
    spent = Spent(exchange=0.2, apart=0.5, together=0.25, rounds=4)
    assert spent.ratio == 0.5
    assert str(spent) == (
        "4 rounds, exchange 0.200 s, products as long: one after another 0.500 s, overlapping 0.250 s, ratio 0.50; "
        "limit 0.95"
    )
