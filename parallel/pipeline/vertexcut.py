"""The cheapest set of vertices that separates a source from wanted vertices (maximum flow, minimum cut).

Each vertex is split in two, joined by an edge of its weight; edges between vertices never end up in the cut. Flow is
pushed along shortest paths (Edmonds and Karp 1972); among equally cheap sets, the one nearest the source is found.

    source --supply--> [in n] --weight--> [out n] --inf--> [in m] --weight--> [out m] --inf--> sink
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from math import inf

_Node = tuple[str, int]
_SOURCE, _SINK = ("source", 0), ("sink", 0)


class VertexCut:
    """A graph that is filled vertex by vertex and then cut."""

    def __init__(self, wanted: Iterable[int]) -> None:
        self._room: dict[_Node, dict[_Node, float]] = defaultdict(lambda: defaultdict(float))
        self._vertices: set[int] = set()
        for vertex in wanted:
            self._room["out", vertex][_SINK] = inf

    def add(self, vertex: int, weight: float, supply: float, after: Iterable[int]) -> None:
        """A vertex: ``weight`` to cut it, ``supply`` from the source straight into it, the vertices before it."""
        self._vertices.add(vertex)
        self._room["in", vertex]["out", vertex] = weight
        if supply:
            self._room[_SOURCE]["in", vertex] = supply
        for before in after:
            self._room["out", before]["in", vertex] = inf

    def solve(self) -> tuple[int, ...] | None:
        """The vertices of the cheapest cut, ascending; None where every cut takes a vertex of infinite weight."""
        while True:
            parent = self._reach()
            if _SINK not in parent:
                return tuple(sorted(n for n in self._vertices if ("in", n) in parent and ("out", n) not in parent))
            path = []
            node = _SINK
            while node != _SOURCE:
                path.append((parent[node], node))
                node = parent[node]
            flow = min(self._room[a][b] for a, b in path)
            if flow == inf:
                return None
            for a, b in path:
                self._room[a][b] -= flow
                self._room[b][a] += flow

    def _reach(self) -> dict[_Node, _Node]:
        """Every node that the source reaches through edges with room, and the node before it."""
        parent = {_SOURCE: _SOURCE}
        queue = deque([_SOURCE])
        while queue and _SINK not in parent:
            node = queue.popleft()
            for following, room in self._room[node].items():
                if room > 0 and following not in parent:
                    parent[following] = node
                    queue.append(following)
        return parent
