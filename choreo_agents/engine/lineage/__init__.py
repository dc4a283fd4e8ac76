"""Messages as a store keeps them: from what they are computed, and what each thread says of them."""

from choreo_agents.engine.lineage.exchange import DescribedMessage, LineageExchange
from choreo_agents.engine.lineage.rows import DamagedRowError, LineageRow, Note

__all__ = ["DamagedRowError", "DescribedMessage", "LineageExchange", "LineageRow", "Note"]
