"""Messages of an engine: lineage, leases, and how calls read their KV or text."""
