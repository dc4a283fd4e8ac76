"""The page of a run in a browser without a network: what it shows is the run's, and nothing in it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.browsers import opened
from support.runs_to_look_at import RUNS, Looked, page_for
from support.traced import call_line, message_line, run_line, written

from choreo_agents.engine.recording.format import read_recording
from choreo_agents.inspection import page_of, run_data

NAMES = [*RUNS]
REPAINTED_MS = 100
"""A click's repaint at most, with 2,000 messages."""


def number(page: Any, total: str) -> int:
    return int(page.locator(f'[data-total="{total}"]').inner_text().replace(",", ""))


def bars(page: Any) -> Any:
    """The calls of the timeline."""
    return page.locator("svg [role=option]")


def rows(page: Any, caption: str) -> list[list[str]]:
    """A table's cells, by its caption."""
    found = page.locator("table", has=page.locator("caption", has_text=caption)).first
    return [row.locator("th, td").all_inner_texts() for row in found.locator("tbody tr").all()]


@pytest.mark.parametrize("name", NAMES)
def test_its_numbers_are_the_runs(browser: Any, runs: dict[str, Looked], name: str) -> None:
    looked = runs[name]
    calls = looked.recording.calls()
    with opened(browser, looked.page) as shown:
        page = shown.page
        assert number(page, "calls") == len(calls) > 0
        assert number(page, "encoded") == sum(call.tokens_encoded for call in calls) > 0
        assert number(page, "reused") == sum(call.tokens_reused for call in calls)
        assert number(page, "said") == sum(call.sampled for call in calls)
        if name != "fork":  # what a fork takes over is encoded for no call of its own
            assert number(page, "encoded") == looked.stats.tokens_encoded
        if name == "modules":
            assert 0 < number(page, "modules") < number(page, "encoded")
        page.get_by_role("tab", name="Messages").click()
        told = rows(page, "calls of agents")
        assert [row[0] for row in told] == [call.author for call in calls]
        assert [int(row[3].replace(",", "")) for row in told] == [call.tokens_encoded for call in calls]
        assert [row[7] for row in told] == ["masked" if call.text is None else call.text[:120] for call in calls]
        assert not shown.complaints and not shown.asked


@pytest.mark.parametrize("name", NAMES)
def test_every_view_is_drawn_without_a_complaint(browser: Any, runs: dict[str, Looked], name: str) -> None:
    with opened(browser, runs[name].page) as shown:
        page = shown.page
        assert bars(page).count() == len(runs[name].recording.calls())
        tabs = page.get_by_role("tab").all_inner_texts()
        assert tabs == ["Timeline", "Messages", "Edges", "Memory", *(["Side by side"] if name == "fork" else [])]
        for tab in tabs:
            page.get_by_role("tab", name=tab).click()
            assert page.locator("#view").inner_text().strip() or page.locator("#view svg").count()
        assert not shown.complaints and not shown.asked


def test_what_a_tool_returned_is_read_as_its_callers(browser: Any, runs: dict[str, Looked]) -> None:
    with opened(browser, runs["tools"].page) as shown:
        shown.page.get_by_role("tab", name="Messages").click()
        [tools] = rows(shown.page, "Functions, tools")
        assert tools[0] == "tools" and tools[3:] == ["result"]
        shown.page.get_by_role("tab", name="Timeline").click()
        bars(shown.page).nth(1).click()
        # What a tool returned is its caller's to say.
        read = {(row[0], row[1]) for row in rows(shown.page, "What it reads, in order")}
        assert ("a tool of ann", "given") in read and ("ann", "given") not in read
        assert not shown.complaints


def test_modules_are_told_from_what_was_given_and_shared(browser: Any, runs: dict[str, Looked]) -> None:
    with opened(browser, runs["modules"].page) as shown:
        bars(shown.page).nth(1).click()
        read = {(row[0], row[1]) for row in rows(shown.page, "What it reads, in order")}
        assert {("team/rules", "module"), ("team/bags", "module")} <= read and "shared" not in {how for _, how in read}
        assert shown.page.locator("#detail svg .way.module").count() == 2 * 2
        shown.page.get_by_role("tab", name="Edges").click()
        edges = {row[0]: row for row in rows(shown.page, "What each edge saves")}
        assert int(edges["team/rules → guide"][3]) > 0 and edges["team/bags → guide"][4] == "0"
        assert not shown.complaints


def test_a_message_shows_its_view_to_scale_and_who_is_behind_it(browser: Any, runs: dict[str, Looked]) -> None:
    looked = runs["look"]
    bob, cleo = looked.recording.calls()[1:3]
    with opened(browser, looked.page) as shown:
        page = shown.page
        bars(page).nth(1).click()
        told = rows(page, "What it reads, in order")
        assert [(int(row[3].replace(",", "")), int(row[2].replace(",", ""))) for row in told] == [
            (at, length) for at, length in zip(bob.offsets, lengths(looked, bob.view), strict=True)
        ]
        assert ("Ann", "shared") in {(row[0], row[1]) for row in told}
        assert page.locator("#detail svg .way").count() == 2 * len(bob.view) + 1
        bars(page).nth(2).click()
        told = rows(page, "What it reads, in order")
        assert {(row[0], row[1]) for row in told} >= {("Ann", "re-encoded"), ("Bob", "re-encoded")}
        behind = {row[0]: row for row in rows(page, "Authors behind it")}
        assert behind["Ann"][1] == behind["Bob"][1] == "words alone"
        assert behind["Bob"][2:] == ["Bob → Cleo", "Bob → Cleo"] and behind["Ann"][3] == "no single edge"
        assert cleo.author == "Cleo" and not shown.complaints


def lengths(looked: Looked, names: tuple[str, ...]) -> list[int]:
    known = {each["name"][2:]: each["tokens"] for each in run_data(looked.recording)["messages"]}
    return [known[name] for name in names]


def test_edges_count_what_was_shared_and_what_was_encoded_again(browser: Any, runs: dict[str, Looked]) -> None:
    with opened(browser, runs["look"].page) as shown:
        shown.page.get_by_role("tab", name="Edges").click()
        edges = {row[0]: row for row in rows(shown.page, "What each edge saves")}
        assert edges["Ann → Bob"][1] == "shared" and int(edges["Ann → Bob"][3]) > 0 and edges["Ann → Bob"][4] == "0"
        again = edges["Ann → Cleo"]
        assert again[1] == "reencoded" and again[3] == "0" and int(again[4]) > 0 and again[5] == "0 %"


def test_memory_is_told_by_tier_and_author_over_time(browser: Any, runs: dict[str, Looked]) -> None:
    looked = runs["look"]
    calls = looked.recording.calls()
    names = {name for call in calls for name in (*call.view, call.answer)}
    with opened(browser, looked.page) as shown:
        shown.page.get_by_role("tab", name="Memory").click()
        plots = shown.page.locator("#view .plot")
        assert plots.count() == plots.locator("canvas").count() == 2
        grown = plots.nth(1)
        assert int(grown.get_attribute("data-tokens")) == sum(lengths(looked, tuple(names)))
        ann = sum(lengths(looked, tuple(name for name in names if author_of(looked, name) == "Ann")))
        told = grown.get_attribute("aria-label")
        assert f"Ann {ann * looked.recording.header.bytes_per_token:,}" in told
        legend = grown.locator(".u-legend .u-label").all_inner_texts()
        assert {"Ann", "Bob", "Cleo"} <= set(legend) and not shown.complaints


def author_of(looked: Looked, name: str) -> str | None:
    return next(each["author"] for each in run_data(looked.recording)["messages"] if each["name"][2:] == name)


def test_a_fork_stands_beside_what_it_was_forked_from(browser: Any, runs: dict[str, Looked]) -> None:
    with opened(browser, runs["fork"].page) as shown:
        page = shown.page
        page.get_by_role("tab", name="Side by side").click()
        told = {row[0]: row for row in rows(page, "Call by call")}
        assert told["Ann"][3] == "the same" and told["Bob"][2].strip() == "Bob has nothing."
        assert told["Bob"][3] == runs["look"].recording.calls()[1].text
        assert "of 3 calls differ" in page.locator("#view p").first.inner_text()
        assert not shown.complaints


def test_search_light_and_dark_and_the_keyboard(browser: Any, runs: dict[str, Looked]) -> None:
    looked = runs["debate"]
    with opened(browser, looked.page, color_scheme="light") as shown:
        page = shown.page
        page.get_by_label("Search").fill("ann")
        hits = [call for call in looked.recording.calls() if "ann" in f"{call.author}\n{call.text}".lower()]
        assert page.locator("#found").inner_text() == f"{len(hits)} found"
        assert page.locator(".bar.missed[role=option]").count() == len(looked.recording.calls()) - len(hits)
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        page.get_by_label("Search").fill("")
        page.get_by_role("listbox").focus()
        for key in ("Home", "ArrowRight"):
            page.keyboard.press(key)
        chosen = page.locator("[role=option][aria-selected=true]")
        assert chosen.count() == 1 and page.get_by_role("listbox").get_attribute("aria-activedescendant") == (
            chosen.get_attribute("id")
        )
        in_time = sorted(looked.recording.calls(), key=lambda call: call.submitted_s)
        assert page.locator("#detail h2").inner_text().startswith(in_time[1].author)
        page.locator("#tab-timeline").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(":focus").get_attribute("id") == "tab-messages"
        assert page.locator("#tab-messages").get_attribute("aria-selected") == "true"
        assert not shown.complaints


def test_what_is_read_can_be_told_from_its_ground(browser: Any, runs: dict[str, Looked]) -> None:
    contrast = """
      (() => { const light = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => { x /= 255;
          return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
          return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
        const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
          if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
        return [...document.querySelectorAll("p, th, td, button, caption, dt, dd, h1, h2, h3, blockquote, em")]
          .filter((e) => e.offsetParent && e.textContent.trim())
          .map((e) => { const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05); }); })()"""
    for scheme in ("light", "dark"):
        with opened(browser, runs["look"].page, color_scheme=scheme) as shown:
            bars(shown.page).nth(2).click()
            for tab in shown.page.get_by_role("tab").all():
                tab.click()
                assert min(shown.page.evaluate(contrast)) >= 4.5, (scheme, tab.inner_text())


def test_text_of_messages_is_text(browser: Any, tmp_path: Path) -> None:
    bad = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>{{SCRIPT}}<!--\u2028"
    path = written(
        tmp_path / f"{bad[:8].replace('/', '')}.jsonl",
        run_line(thread=bad).model_copy(update={"edges": ((bad, bad, bad),)}),
        message_line("x").model_copy(update={"author": bad, "name": bad}),
        message_line("y", parents=[bad]).model_copy(update={"author": bad, "sources": (bad,)}),
        call_line(bad, 1, 0.0, 1.0, text=bad, finish_reason=bad, view=(bad,), offsets=(0,), answer="y"),
        call_line("b", 2, 1.0, 2.0, text=bad, view=("y",), offsets=(0,), answer="z"),
    )
    data = run_data(read_recording(path))
    data["model"] = data["title"] = bad
    data["conditions"] = {bad: bad}
    page = tmp_path / "page.html"
    page.write_text(page_of(data))
    with opened(browser, page) as shown:
        for tab in shown.page.get_by_role("tab").all():
            tab.click()
        for option in range(2):
            shown.page.get_by_role("tab", name="Timeline").click()
            bars(shown.page).nth(option).click()
            assert bad.strip("\u2028") in shown.page.locator("#detail blockquote").inner_text()
        assert shown.page.evaluate("window.ran") is None and shown.page.title() == bad
        assert shown.page.locator("img").count() == 0 and not shown.asked
        before = len(shown.complaints)
        shown.page.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 2';"
            " document.body.append(s); const i = new Image(); i.src = 'https://example.invalid/x.png';"
            " document.body.append(i); }"
        )
        assert shown.page.evaluate("window.ran") is None, "the policy lets no other script run"
        assert len(shown.complaints) > before, "and nothing be fetched"


def test_a_click_repaints_at_once_among_two_thousand_messages(browser: Any, tmp_path: Path) -> None:
    lines: list[Any] = [run_line()]
    made: list[str] = []
    for i in range(2000):
        read = made[-60:]
        name = f"m{i}"
        lines.append(message_line(name, tokens=30, parents=read).model_copy(update={"author": f"agent {i % 12}"}))
        offsets = tuple(30 * j for j in range(len(read)))
        lines.append(
            call_line(
                f"agent {i % 12}", i // 12, i * 0.1, i * 0.1 + 0.9, answer=name, text=f"word {i} " * 20
            ).model_copy(
                update={"view": tuple(read), "offsets": offsets, "position": 30 * len(read), "superstep": i // 12}
            )
        )
        made.append(name)
    path = written(tmp_path / "long.jsonl", *lines)
    page = page_for(path)
    data = len(json.dumps(run_data(read_recording(path))))
    assert page.stat().st_size - data < 1_000_000
    with opened(browser, page) as shown:
        clicked = """(id) => new Promise((done) => { const bar = document.getElementById(id);
            const began = performance.now(); bar.dispatchEvent(new MouseEvent("click", { bubbles: true }));
            requestAnimationFrame(() => setTimeout(() => done(performance.now() - began))); })"""
        taken = sorted(shown.page.evaluate(clicked, f"bar-0:{i}") for i in range(1990, 1999))
        assert taken[len(taken) // 2] <= REPAINTED_MS, taken
        assert shown.page.locator("#detail h2").inner_text().startswith("agent ")
        shown.page.get_by_role("tab", name="Messages").click()
        assert shown.page.locator("tr[data-key]").count() == 2000
        assert not shown.complaints


def test_the_page_that_is_shipped_is_small_and_names_what_it_runs() -> None:
    page = (Path(__file__).parents[2] / "choreo_agents/inspection/run.html").read_text()
    assert len(page) < 1_000_000 and not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", page.replace("https://github.com", "")
    )
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
