"""Clusters of namespaces for the tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.network import Cluster


@pytest.fixture
def clusters() -> Iterator[Callable[[int], Cluster]]:
    """``clusters(2)``: a cluster of two nodes, until the end of the test."""
    made: list[Cluster] = []

    def make(nodes: int) -> Cluster:
        made.append(Cluster(nodes).__enter__())
        return made[-1]

    yield make
    for cluster in made:
        cluster.__exit__(None, None, None)
