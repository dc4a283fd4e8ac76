"""Keys, tenants, threads, and handles that programs elsewhere keep."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest
from choreo_server import Keys, Limits, server_app
from choreo_server.errors import RefusedError
from choreo_server.tenancy import read_keys, require_no_other_site
from support.adapters import save_adapter
from support.chatty import save_chatty
from support.serving import CHAT, asked, client_of, streamed

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling
from choreo_agents.errors import AdapterError, InvalidRequestError
from choreo_agents.models import load_model

KEYS = Keys(["# who may call", "", "k-ann ann", "k-ann2 ann", "k-bob bob", "k-root operator"])
ASKED = [{"role": "user", "content": "What does Bob have?"}]
TOLD = [{"role": "system", "content": "Notes: Ann has 3 red kites. Bob has 5 blue boats."}, *ASKED]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load("embedded") as engine:
        yield engine
        engine.check()


async def test_only_who_has_a_key_may_call(engine: Engine) -> None:
    app = server_app(engine, keys=KEYS)
    for key in (None, "k-eve", "ann", "k-ann k-bob"):
        async with client_of(app, key) as client:
            error = (await asked(client, 401))["error"]
            assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
            for path in ("/v1/models", "/metrics"):
                assert (await client.get(path)).headers["www-authenticate"] == "Bearer"
            assert (await client.get("/health")).status_code == 200
    async with client_of(app, "k-ann2") as client:
        assert (await asked(client, max_tokens=3))["choices"]


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", None, 200),
        ("LOCALHOST", None, 200),
        ("me.localhost:8000", None, 200),
        ("127.0.0.1:8000", None, 200),
        ("[::1]:8000", None, 200),
        ("192.168.0.7:8000", None, 200),
        ("choreo:8000", None, 200),
        (gethostname(), None, 200),
        (None, None, 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("LocalHost:80", "http://localhost", 200),
        ("127.0.0.1:443", "https://127.0.0.1", 200),
        ("eve.example:8000", None, 403),
        ("eve.example", "http://eve.example", 403),
        ("localhost.eve.example", None, 403),
        ("", None, 403),
        ("[::1", None, 403),
        ("127.0.0.1.eve.example", None, 403),
        ("localhost:8000", "http://localhost:9000", 403),
        ("localhost:80", "https://localhost", 403),
        ("localhost:8000", "https://eve.example", 403),
        ("192.168.0.7:8000", "https://eve.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[::1", 403),
        (None, "http://localhost", 403),
    ],
)
async def test_without_keys_no_web_page_of_others_may_call(
    host: str | None, origin: str | None, status: int, engine: Engine
) -> None:
    told = {name: value for name, value in (("host", host), ("origin", origin)) if value is not None}
    if status == 200:
        require_no_other_site(told, {"choreo"})
    else:
        with pytest.raises(RefusedError) as refused:
            require_no_other_site(told, {"choreo"})
        assert refused.value.status == 403


async def test_a_page_of_another_site_is_refused_unless_it_has_a_key(engine: Engine) -> None:
    headers = {"Origin": "https://eve.example"}
    async with client_of(server_app(engine)) as client:
        for response in (
            await client.post(CHAT, content=b"{}", headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.get("/metrics", headers={"Host": "eve.example"}),
        ):
            assert response.status_code == 403 and response.json()["error"]["code"] in ("site", "unknown_host")
        assert (await client.get("/v1/models")).status_code == 200
    async with client_of(server_app(engine, keys=KEYS), "k-ann") as client:
        assert (await client.get("/v1/models", headers=headers | {"Host": "eve.example"})).status_code == 200


async def test_tenants_find_nothing_of_each_other(engine: Engine) -> None:
    app = server_app(engine, keys=KEYS)
    cached = []
    for key in ("k-ann", "k-bob", "k-ann2"):
        async with client_of(app, key) as client:
            said = await asked(client, messages=TOLD, max_tokens=8, choreo={"thread": "one"})
            cached.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[1] == 0 < cached[2], "two keys of one tenant, and another tenant"
    metrics = []
    for key in ("k-bob", "k-root"):
        async with client_of(app, key) as client:
            metrics.append((await client.get("/metrics")).text)
    finished = [float(text.partition("\nchoreo_finished_total ")[2].split()[0]) for text in metrics]
    assert finished[1] > finished[0] > 0, "the operator is shown what all do"
    assert ["choreo_http_requests_total" in text for text in metrics] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_more_answers_than_a_tenant_may_ever_have_are_refused_for_good(stream: bool, engine: Engine) -> None:
    """A client that is told to try again later would do so for ever."""
    limits = Limits(tenant_answers=2)
    async with client_of(server_app(engine, keys=KEYS, limits=limits), "k-ann") as client:
        error = (await asked(client, 400, n=3, stream=stream))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "n") and "at most 2" in error["message"]
        assert len((await asked(client, n=2, max_tokens=2))["choices"]) == 2
    async with client_of(engine, limits=limits) as anybody:
        assert len((await asked(anybody, n=3, max_tokens=2))["choices"]) == 3, "without keys nobody is a tenant"


@pytest.mark.parametrize("reuse", ["prefix", "anywhere"])
async def test_an_earlier_answer_is_read_by_its_handle(reuse: str, engine: Engine) -> None:
    async with client_of(server_app(engine, keys=KEYS), "k-ann") as client:
        said = await asked(client, messages=TOLD, max_tokens=12, choreo={"thread": "a"})
        handle = said["choreo"]["handle"]
        assert said["choices"][0]["choreo"]["handle"] == handle
        own = {"parents": [handle], "reuse": reuse, "thread": "b"}
        read = await asked(client, messages=ASKED, max_tokens=12, choreo=own)
        alone = await asked(client, messages=ASKED, max_tokens=12, choreo={"thread": "c"})
        assert read["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"]
        assert read["usage"]["prompt_tokens_details"]["cached_tokens"] >= said["usage"]["completion_tokens"]
        assert "5 blue boats" in read["choices"][0]["message"]["content"]
        assert "5 blue boats" not in alone["choices"][0]["message"]["content"]
        events = await streamed(client, messages=ASKED, max_tokens=12, choreo=own)
        assert events[-1]["choreo"]["handle"]


async def test_nobody_learns_whether_a_handle_is_there(engine: Engine) -> None:
    app = server_app(engine, keys=KEYS)
    async with client_of(app, "k-ann") as client:
        handle = (await asked(client, max_tokens=3, choreo={"thread": "a"}))["choreo"]["handle"]
        said, _, seal = handle.partition(".")
        other = json.loads(base64.urlsafe_b64decode(said + "=="))
        other = base64.urlsafe_b64encode(json.dumps(other | {"length": 1}).encode()).decode().rstrip("=")
        wrong = [
            await asked(client, 404, choreo={"parents": [word]}) for word in ("", "x.y", f"{other}.{seal}", f"{said}.é")
        ]
    async with client_of(app, "k-bob") as client:
        wrong.append(await asked(client, 404, choreo={"parents": [handle]}))
    [tenant] = [each for name, each in app._tenancy._engines.items() if name == "ann"]
    tenant.threads.forget("a")
    async with client_of(app, "k-ann") as client:
        wrong.append(await asked(client, 404, choreo={"parents": [handle]}))
    assert all(each == wrong[0] for each in wrong), "forged, changed, another's and forgotten are told alike"


async def test_attack_what_a_graph_has_signed_is_no_handle_of_the_servers(engine: Engine) -> None:
    """A client that has been shown a graph's state of the same tenant, and notes on messages, which are refused."""
    app = server_app(engine, keys=KEYS)
    note = {"author": "agent", "persona": "agent", "confidential": False}
    told = [*TOLD, {"role": "assistant", "content": "5 blue boats."}, {"role": "user", "content": "And Ann?"}]
    async with client_of(app, "k-ann") as client:
        noted = [
            each | {"response_metadata": {"choreo": note}, "additional_kwargs": {"choreo_source": "agent"}}
            for each in told
        ]
        error = (await asked(client, 400, messages=noted, max_tokens=3))["error"]
        assert error["param"] == "messages.0.response_metadata"
        [tenant] = [each for name, each in app._tenancy._engines.items() if name == "ann"]
        graph = ChoreoGraph().add_node(Agent("agent", sampling=Sampling(max_tokens=3))).add_edge(START, "agent")
        state = graph.compile(engine=tenant).invoke({"messages": [("user", "What does Bob have?")]})
        for entry in state["handles"]:
            said = base64.urlsafe_b64encode(json.dumps(entry["handle"]).encode()).decode().rstrip("=")
            for code in entry["signature"].values():
                await asked(client, 404, choreo={"parents": [f"{said}.{code}"]})
        await asked(client, 400, handles=state["handles"])


def test_keys_of_the_environment_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("k ann,k2 bob", "k ann\nk2 bob"):
        monkeypatch.setenv("CHOREO_KEYS", told)
        assert read_keys(None).tenant("Bearer k2") == "bob"
    for told in ("", ",", "# k ann"):
        monkeypatch.setenv("CHOREO_KEYS", told)
        with pytest.raises(InvalidRequestError, match="has no keys"):
            read_keys(None)
    monkeypatch.delenv("CHOREO_KEYS")
    assert not read_keys(None)


@pytest.mark.parametrize("lines", [["one"], ["one two three"], ["k ann", "k bob"]])
def test_keys_that_are_none_are_refused(lines: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match=f"line {len(lines)} of the keys"):
        Keys(lines)


async def test_adapters_are_models_to_whoever_calls(tmp_path: Path) -> None:
    model = save_chatty(tmp_path / "model")
    adapters = {"polite": save_adapter(tmp_path / "polite", model)}
    answers = {}
    with Engine.load(load_model(model)) as engine:
        for keys, key in ((KEYS, "k-ann"), (Keys(), None)):
            async with client_of(server_app(engine, name="plain", keys=keys, adapters=adapters), key) as client:
                for name in ("plain", "polite", None):
                    said = await asked(client, model=name, max_tokens=8)
                    answers[key, name] = said["choices"][0]["message"]["content"]
                    assert said["model"] == (name or "plain")
                assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["plain", "polite"]
                assert (await client.get("/v1/models/polite")).json()["id"] == "polite"
                assert (await asked(client, 404, model="rude"))["error"]["code"] == "model_not_found"
        assert answers["k-ann", "plain"] == answers["k-ann", None] != answers["k-ann", "polite"]
        assert [answers["k-ann", name] == answers[None, name] for name in ("plain", "polite")] == [True, True]
        with pytest.raises(InvalidRequestError, match="'polite' is the model"):
            server_app(engine, name="polite", adapters=adapters)
        with pytest.raises(AdapterError):
            server_app(engine, adapters={"none": model})
