"""Audits which private contexts can influence which agents: `static` before a run, `observed` afterwards from
lineage."""
