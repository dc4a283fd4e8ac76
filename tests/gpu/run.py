"""Runs all stages, and ends with 1 if one failed or missed its bar: `python -m gpu.run --device cuda`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where table.jsonl is written")
    parser.add_argument("--only", nargs="*", default=None, help="these stages")
    parser.add_argument("--backends", nargs="*", default=None, help="these attention backends")
    asked = parser.parse_args()
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

    import torch

    from gpu import exact
    from gpu.rows import Table
    from gpu.stages import STAGES

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: make gpu DEVICE=cpu is the dry run", file=sys.stderr)
        return 2
    if asked.backends is not None:
        exact.BACKENDS = tuple(asked.backends)
    torch.set_num_threads(min(4, torch.get_num_threads()))
    table = Table(asked.out / "table.jsonl", torch.device(asked.device))
    for name, stage in STAGES.items():
        if asked.only is None or name in asked.only:
            table.stage(name, stage)
    for row in table.missed:
        print(f"missed: {row['stage']}: {row['name']}: {row['value']} ({row['bar']})", file=sys.stderr)
    return int(bool(table.missed))


if __name__ == "__main__":
    sys.exit(main())
