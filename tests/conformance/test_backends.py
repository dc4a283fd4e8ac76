"""Every attention backend that this machine has does what is asked of any."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from support.backends import available_backends

from choreo_agents.attention.backends import AttentionBackend, make_backend
from choreo_agents.errors import InvalidRequestError
from choreo_agents.testing.conformance import TOLERANCE, BackendConformance

BACKENDS = available_backends()


class Conforms(BackendConformance):
    """A backend by its name."""

    name = ""

    def backend(self, dtype: torch.dtype) -> AttentionBackend:
        return make_backend(self.name, dtype, self.device)


def served(name: str) -> Iterator[torch.dtype]:
    for dtype in TOLERANCE:
        try:
            make_backend(name, dtype, BACKENDS[name])
        except InvalidRequestError:
            continue
        yield dtype


for name, device in BACKENDS.items():
    about = {"name": name, "device": device, "dtypes": tuple(served(name)), "skips_hidden": name != "reference"}
    globals()[f"Test{name.title()}"] = type(f"Test{name.title()}", (Conforms,), about)
