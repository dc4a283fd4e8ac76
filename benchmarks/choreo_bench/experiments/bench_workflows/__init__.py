"""The paper's workflows with given words under every method: what each encodes, and how long it takes."""
