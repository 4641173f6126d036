"""Rows that ranks with parts of a layer's experts send each other: expected for even routing, and the most for any.

Even routing chooses each set of k of E experts with equal probability, so that a row needs at least one of the E_r
experts of rank r with probability 1 - C(E - E_r, k) / C(E, k). Pure arithmetic, no torch.

A step of the engine sends, for each layer and microbatch of T rows:

    routing    the numbers of rows (stacked experts: also of experts of rows, and of choices), gathered by all ranks
    dispatch   a row, the weights and the numbers of its experts to each rank that has one of them
    combine    one result from each of these ranks
    backward   the gradients of results, as dispatch sends rows; the gradients of rows and weights, as combine does

Recomputation repeats the forward, and so do several rounds.
"""

from dataclasses import dataclass
from math import comb
from typing import Literal, NamedTuple

NUMBER_BYTES = 4
"""Bytes of the number of an expert."""
COUNT_BYTES = 8
"""Bytes of a number of rows."""


class ExchangedRows(NamedTuple):
    """Numbers of token rows that a rank sends to other ranks and receives from them, in one call of an MoE layer."""

    gives: float
    """Rows to the ranks of their experts."""
    gets: float
    """Rows from other ranks, for experts of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """Sizes of the exchange of token rows in one call of an MoE layer with experts divided among ranks."""

    experts: int
    chosen: int
    """Number of experts of a token."""
    ranks: int
    tokens: float
    """Tokens of a rank and call."""
    width: int
    """Elements of a row."""
    itemsize: int = 2
    form: Literal["token", "row", "list"] = "token"
    """``token``: a token is one row to a rank with all its experts there. ``row``: it is one row to each expert.
    ``list``: the same, and rows are sent without weights and numbers, all at once."""

    def held(self, rank: int) -> int:
        """Returns the number of experts on expert rank ``rank``; if the division is uneven, the first ranks have one
        more.
        """
        least, more = divmod(self.experts, self.ranks)
        return least + (rank < more)

    def even(self, rank: int) -> ExchangedRows:
        """Returns the expected numbers of rows that expert rank ``rank`` sends and receives in a call with even
        routing.
        """
        own = self._rows_to(rank)
        return ExchangedRows(self.tokens * (self._rows_to_all() - own), self.tokens * (self.ranks - 1) * own)

    def mean(self) -> ExchangedRows:
        """Returns :meth:`even` averaged over the ranks: expected numbers of rows that a rank sends and receives in a
        call.
        """
        gives = self.tokens * self._rows_to_all() * (self.ranks - 1) / self.ranks
        return ExchangedRows(gives, gives)

    def most(self) -> ExchangedRows:
        """Returns an upper bound of the numbers of rows that a rank sends and receives, for any routing."""
        gives = min(self.chosen, self.ranks - 1) if self.form == "token" else self.chosen
        return ExchangedRows(self.tokens * gives, (self.ranks - 1) * self._most_of_one)

    @property
    def limit(self) -> float:
        """Largest number of rows from one rank to another in one round of the exchange; more rows need more rounds."""
        share = max(1, 2 * self.tokens * self.chosen // self.ranks)
        return self._most_of_one if self.form == "list" else min(self._most_of_one, share)

    @property
    def rounds_repeat(self) -> bool:
        """True if the exchange may need several rounds; the backward then repeats the forward's rounds."""
        return self.limit < self._most_of_one

    @property
    def round_bytes(self) -> float:
        """Largest number of bytes of a rank's buffers in one round of the exchange."""
        received = self.ranks * self.limit
        given = min(received, self.tokens * (min(self.chosen, self.ranks) if self.form == "token" else self.chosen))
        return (received + given) * (self._row_bytes + self._result_bytes)

    def forward_bytes(self, rows: ExchangedRows) -> float:
        """Returns the bytes that a rank sends in a forward of the MoE layer: rows, results of received rows, counts.

        ``rows``: numbers of sent and received rows.
        """
        return rows.gives * self._row_bytes + rows.gets * self._result_bytes + self._routing_bytes

    def backward_bytes(self, rows: ExchangedRows) -> float:
        """Returns the bytes that a rank sends in one backward without recomputation. ``rows``: exchanged rows of the
        forward.
        """
        row = self._row_bytes - self._slots * NUMBER_BYTES
        return rows.gives * self._result_bytes + rows.gets * row

    def sent_bytes(self, rows: ExchangedRows, forwards: int = 1) -> float:
        """Returns the bytes that a rank sends in ``forwards`` forwards and one backward. ``rows``: exchanged rows of a
        forward.
        """
        return forwards * self.forward_bytes(rows) + self.backward_bytes(rows)

    def _rows_to(self, rank: int) -> float:
        """Returns the expected rows to ``rank`` of one token."""
        held = self.held(rank)
        if self.form != "token":
            return self.chosen * held / self.experts
        return 1 - comb(self.experts - held, self.chosen) / comb(self.experts, self.chosen)

    def _rows_to_all(self) -> float:
        """Returns the expected rows of one token to all ranks."""
        more = self.experts % self.ranks  # the first ranks
        return more * self._rows_to(0) + (self.ranks - more) * self._rows_to(self.ranks - 1)

    @property
    def _most_of_one(self) -> float:
        """Most rows that a rank gets from another one."""
        return self.tokens * (1 if self.form == "token" else min(self.chosen, self.held(0)))

    @property
    def _slots(self) -> int:
        """Numbers and weights of a row."""
        return {"token": self.chosen, "row": 1, "list": 0}[self.form]

    @property
    def _row_bytes(self) -> int:
        return (self.width + self._slots) * self.itemsize + self._slots * NUMBER_BYTES

    @property
    def _result_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def _routing_bytes(self) -> int:
        table = self.ranks * self.held(0) if self.form == "list" else 2 * self.ranks + 1
        return COUNT_BYTES * (self.ranks - 1) * table
