"""From what the messages of a graph's state were made, whichever of its engines has made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from choreo_agents.engine import Engine
from choreo_agents.engine.inspect import Descent
from choreo_agents.errors import HandleError
from choreo_agents.kv.handle import MessageHandle


class Origins:
    """What lineage says, across models: words are followed from one to the next, encodings end with their model.

    Args:
        engines: Which serve the graph, or did.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._by_model = {engine.model.adapter.fingerprint: engine for engine in engines}
        self._made: dict[str, Descent] = {}
        self._makers: dict[str, Engine] = {}

    @property
    def engines(self) -> Sequence[Engine]:
        return tuple(self._by_model.values())

    def knows(self, handle: MessageHandle) -> bool:
        """Whether the model that made a message is served."""
        return handle.base_model in self._by_model

    def find(self, handle: MessageHandle) -> None:
        """Find out about a message, and all that it descends from.

        Raises:
            HandleError: Its engine does not know it any more.
        """
        told = set[str]()
        queue = self._load(handle)
        for message in queue:
            for said in self._made[message].foreign:
                if said.id not in told and said.id not in self._made and self.knows(said):
                    told.add(said.id)
                    try:
                        queue += self._load(said)
                    except HandleError:
                        continue  # its engine has forgotten it: whose words they are is known all the same

    def made(self, message: str) -> Descent:
        """Of a message that was found, or that one of these descends from."""
        return self._made[message]

    def maker(self, message: str) -> Engine:
        """The engine that made it."""
        return self._makers[message]

    def sources(self, message: str) -> Sequence[str]:
        """Whose words it has, other models' included: those that are found."""
        made = self._made[message]
        return (*made.sources, *(said.id for said in made.foreign if said.id in self._made))

    def _load(self, handle: MessageHandle) -> list[str]:
        """What is new: messages by their ids."""
        engine = self._by_model[handle.base_model]
        found = engine.inspect.descent([handle], self._made)
        self._made |= found
        self._makers |= dict.fromkeys(found, engine)
        return list(found)
