"""Clients given as a list of their data, or as a mapping that loads it on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedcams.engines import Examples
from fedcams.errors import SpecError
from fedcams.simulation.examples import Reader, count_examples


class Clients(Mapping[int, Examples]):
    """A mapping from client id to (inputs, targets).

    A client's data is looked up only when it takes part, and is not kept, so clients that are not in use cost nothing.
    Clients with names instead of numbers are numbered in the order of their names.
    """

    def __init__(self, source: Any, reader: Reader) -> None:
        """Wrap a list, whose places are the ids, or a mapping from ids, integers or strings, to data.

        Refuses an empty source, and ids that no message can carry.
        """
        if not isinstance(source, Mapping | Sequence) or isinstance(source, str):
            raise SpecError(f"clients is a {type(source).__name__}; give a list, or a mapping from id to data")
        if len(source) == 0:
            raise SpecError("clients is empty; give at least one client")
        self._source, self.reader = source, reader
        given: list[Any] = list(source) if isinstance(source, Mapping) else list(range(len(source)))
        named = all(isinstance(client, str) for client in given)
        if not named and (stranger := [client for client in given if not _is_id(client)]):
            fix = "give each client an integer from 0 to 2**64 - 1, or each a string"
            raise SpecError(f"clients has the id {stranger[0]!r}; {fix}")
        self.given: dict[int, Any] = dict(enumerate(sorted(given)) if named else sorted((int(i), i) for i in given))
        """Each client's number, and its id as it was given."""

    def __getitem__(self, client: int) -> Examples:
        name = self.given[client]
        return self.reader.read(self._source[name], f"client {name}")

    def __iter__(self) -> Iterator[int]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def sizes(self) -> list[int] | None:
        """Return the number of examples of each client; None if that would load clients, as a mapping may do."""
        if not isinstance(self._source, list | tuple | dict):
            return None
        return [count_examples(self._source[name]) for name in self.given.values()]


def _is_id(client: Any) -> bool:
    """Return whether a client can have this id: an unsigned integer of 64 bits."""
    return isinstance(client, int | np.integer) and 0 <= int(client) < 2**64
