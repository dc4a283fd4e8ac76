"""The fixtures of `tests/conftest.py`: models, and engines of this process."""

from conftest import embedded, engine, hold_steps, load_engine, logits_by_seed, make_engine, tiny, tiny_path

__all__ = ["embedded", "engine", "hold_steps", "load_engine", "logits_by_seed", "make_engine", "tiny", "tiny_path"]
