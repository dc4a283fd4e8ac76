"""KV out of the engine and into it: `engine.kv`."""
