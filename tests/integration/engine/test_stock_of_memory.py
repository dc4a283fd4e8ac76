"""What an engine says of where its messages are, when that has changed behind its back."""

from __future__ import annotations

import time
from pathlib import Path

from choreo_agents import Engine, Memory


def test_a_discarded_file_is_on_no_disk(tmp_path: Path) -> None:
    with Engine.load("embedded", salt="s", memory=Memory(persist_dir=tmp_path)) as engine:
        handle = engine.prefill(list(range(20, 36)), author="ann")
        engine.kv.persist([handle])
        engine.kv.flush()
        engine.kv.offload([handle])
        assert engine.admin is not None
        [own] = [each for each in engine.admin.tenants().values() if each.messages]
        assert engine.kv.memory_map().authors["ann"].tokens["disk"] == own.tokens["disk"] == 16
        engine.kv.unpersist([handle.id])
        until = time.monotonic() + 60
        while engine.kv.tiers([handle]) != ["lineage"] and time.monotonic() < until:
            time.sleep(0.01)
        [own] = [each for each in engine.admin.tenants().values() if each.messages]
        assert engine.kv.tiers([handle]) == ["lineage"]
        assert engine.kv.memory_map().authors["ann"].tokens["lineage"] == own.tokens["lineage"] == 16


def test_what_the_disk_has_by_now_is_told_of_every_tenant(tmp_path: Path) -> None:
    with Engine.load("embedded", memory=Memory(disk=tmp_path)) as engine:
        engine.prefill(list(range(20, 36)))
        engine.kv.offload()
        assert engine.admin is not None
        until = time.monotonic() + 60
        while not any(each.tokens["disk"] for each in engine.admin.tenants().values()):
            assert time.monotonic() < until, "it is told to be on its way for ever"
            time.sleep(0.01)
