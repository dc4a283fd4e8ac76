"""What needs Ray says so when it is asked for; `import choreo_ray` does not."""

from __future__ import annotations

import sys

import choreo_ray
import pytest


@pytest.mark.parametrize("name", sorted({*choreo_ray.__all__} - {"RouterOptions"}))
def test_what_needs_ray_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [*sys.modules]:
        if module.startswith("choreo_ray.") and not module.startswith("choreo_ray.remote"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ray", None)
    said = f"{name} needs Ray, which is not installed: pip install choreo-ray"
    with pytest.raises(ModuleNotFoundError, match=said) as raised:
        getattr(choreo_ray, name)
    assert raised.value.name == "ray"


def test_options_of_routing_need_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "patience_s" in choreo_ray.RouterOptions.__annotations__
