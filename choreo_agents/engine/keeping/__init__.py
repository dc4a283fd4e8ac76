"""KV that outlives its engine: who has it written, and from what it is read then."""
