"""Messages as a store keeps them: from what they are computed, and what each thread says of them."""

from choreo_agents.engine.lineage.exchange import DescribedMessage, LineageExchange
from choreo_agents.engine.lineage.rows import FORMAT, Answered, DamagedRowError, LineageRow, Note
from choreo_agents.engine.lineage.sealed import SealedRows

__all__ = [
    "FORMAT",
    "Answered",
    "DamagedRowError",
    "DescribedMessage",
    "LineageExchange",
    "LineageRow",
    "Note",
    "SealedRows",
]
