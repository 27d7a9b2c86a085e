"""The status page: what it is told, who may ask, and how it looks in a browser."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from fake_engine import CAPACITY, Call, FakeEngine, answer, chunk, play, wait_for
from PIL import Image

SHOTS = Path(__file__).parents[2] / "var" / "screenshots"


@pytest.fixture
def daemon() -> Iterator[FakeEngine]:
    """The table daemon's HTTP side."""
    daemon = FakeEngine()
    daemon.metrics = {
        "ple_daemon_major_faults_total": 120.0,
        "ple_daemon_drive_read_max_seconds": 0.0123,
        "ple_daemon_resident_share": 0.314,
    }
    yield daemon
    daemon.close()


def figures(gateway, **headers):
    return gateway.request("GET", "/status.json", headers=headers).json


def test_figures_are_those_of_the_services(start_gateway, engine, daemon):
    gateway = start_gateway(daemon_url=daemon.url)
    gateway.wait_ready()
    assert figures(gateway)["first_token_s"] is None
    assert gateway.chat(stream=True).text == "hello"
    engine.script = answer(500, {"error": {"message": "PRIVATE", "code": "PRIVATE text"}})
    gateway.chat()
    engine.script = play(chunk({"content": "x"}), lambda call: call.wait_closed())
    with gateway.open_chat(stream=True, max_tokens=10):
        wait_for(lambda: gateway.metric("requests_in_flight") == 1, "one runs")
        shown = figures(gateway)
    assert shown["gateway"]["state"] == "ready"
    assert shown["engine"]["state"] == "ready"
    assert shown["table"]["state"] == "ready"
    assert shown["running"] == 1
    assert shown["blocks"] == {"used": 59, "budget": CAPACITY["num_blocks"] - 2}
    assert 0 < shown["first_token_s"]["median"] <= shown["first_token_s"]["p95"] < 5
    wait_for(lambda: figures(gateway)["table"]["drive_tail_s"], "the daemon's figures are read")
    assert figures(gateway)["table"]["drive_tail_s"] == 0.0123
    assert figures(gateway)["table"]["resident_share"] == 0.314
    (error,) = shown["errors"]
    assert (error["status"], error["code"], error["route"]) == (500, "other", "/v1/chat/completions")
    assert "PRIVATE" not in json.dumps(figures(gateway))


def test_figures_that_are_not_known_are_null(start_gateway, engine):
    engine.capacity = None
    engine.probe = lambda call: call.answer(404, {}) if call.path == "/metrics" else engine._answer_get(call)
    gateway = start_gateway()
    gateway.wait_ready()
    shown = figures(gateway)
    assert (shown["blocks"], shown["engine"]["tokens_per_s"]) == (None, None)
    assert shown["table"] == {
        "state": "ready",
        "reasons": [],
        "asked": False,
        "cold_reads_per_s": None,
        "drive_tail_s": None,
        "resident_share": None,
    }


def test_page_is_open_and_its_figures_are_as_metrics_are(start_gateway):
    gateway = start_gateway(api_keys="k", metrics_key="always")
    page = gateway.request("GET", "/")
    assert page.status == 200
    assert gateway.request("GET", "/status.json").status == 401
    assert figures(gateway, authorization="Bearer k")["gateway"]["state"] in {"starting", "ready"}
    near = start_gateway(api_keys="k")
    assert near.request("GET", "/status.json").status == 200, "on loopback, as /metrics"


def test_page_brings_all_that_it_needs(gateway):
    page = gateway.request("GET", "/")
    text = page.body.decode()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert 'lang="en"' in text
    assert len(page.body) < 30_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def complaints(browser: Browser) -> list[str]:
    """What the browser has to say against the page: violations of its policy, errors of its script."""
    logged = [e["params"]["entry"] for e in browser.events if e.get("method") == "Log.entryAdded"]
    thrown = [e for e in browser.events if e.get("method") == "Runtime.exceptionThrown"]
    return [entry["text"] for entry in logged if entry["source"] != "network"] + [str(e) for e in thrown]


@pytest.mark.parametrize(("width_px", "dark"), [(390, False), (390, True), (1280, False), (1280, True)])
def test_page_in_a_browser(start_gateway, engine, daemon, browser, width_px, dark):
    engine.capacity = {**CAPACITY, "num_blocks": 244, "max_num_seqs": 4}
    gateway = start_gateway(daemon_url=daemon.url, stall_timeout_s=1, max_in_flight=2)
    gateway.wait_ready()
    gateway.chat(stream=True)
    engine.script = answer(400, {"error": {"message": "x", "code": 400}})
    gateway.chat()
    gateway.chat(model="nobody")
    engine.script = busy
    with gateway.open_chat(stream=True), gateway.open_chat(stream=True), gateway.open_chat(stream=True):
        wait_for(lambda: gateway.metric("requests_queued") == 1, "two run, one waits")
        browser.events.clear()
        browser.view(width_px, 900, dark=dark)
        browser.open(f"{gateway.url}/")
        wait_for(
            lambda: browser.evaluate("document.getElementById('running')?.textContent") == "2 running",
            "the page shows what runs",
        )
        browser.evaluate("at('fill').style.transition = 'none'; look()")
        wait_for(lambda: browser.evaluate("at('tail').textContent") == "12 ms", "and the daemon's figures")
        shot = browser.screenshot()
        shown = browser.evaluate("document.body.innerText").replace("\n", " ")
    for words in ("Triplex", "ready", "Tokens per second", "of 242", "1 waiting", "31 %", "model_not_found"):
        assert words in shown, shown
    assert browser.evaluate("document.documentElement.scrollWidth") == width_px, "nothing sticks out"
    assert complaints(browser) == []
    check_picture(shot, width_px, dark=dark)


def busy(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"content": "x"}))
    call.wait_closed()


def check_picture(shot: bytes, width_px: int, *, dark: bool) -> None:
    """Keep the picture for people to look at; here only: it has a size, its theme and something on it."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / f"status-{width_px}-{'dark' if dark else 'light'}.png").write_bytes(shot)
    with Image.open(io.BytesIO(shot)) as picture:
        assert picture.width == width_px
        colours = picture.convert("L").getcolors(256)
        assert colours
        assert len(colours) > 50, "text has many shades"
        background = picture.convert("RGB").getpixel((2, 2))
        assert (sum(background) < 150) == dark


def test_page_asks_for_a_key_and_keeps_it_in_memory_only(start_gateway, browser):
    gateway = start_gateway(api_keys="the-key", metrics_key="always")
    browser.view(390, 800)
    browser.open(f"{gateway.url}/")
    wait_for(lambda: browser.evaluate("!document.getElementById('ask')?.hidden"), "it asks")

    def enter(key: str) -> None:
        browser.evaluate(f"at('key').value = '{key}'; at('ask').requestSubmit()")

    enter("wrong")
    wait_for(lambda: browser.evaluate("at('wrong').textContent") == "That key is not known.", "it says so")
    enter("the-key")
    wait_for(lambda: browser.evaluate("!at('all').hidden && at('ask').hidden"), "the figures are there")
    kept = browser.evaluate("localStorage.length + sessionStorage.length + document.cookie.length")
    assert kept == 0


def test_page_says_when_the_gateway_is_gone(start_gateway, browser):
    gateway = start_gateway()
    gateway.wait_ready()
    browser.view(390, 800)
    browser.open(f"{gateway.url}/")
    wait_for(lambda: browser.evaluate("at('overall').textContent") == "ready", "it is ready")
    browser.evaluate("window.fetch = () => Promise.reject(new Error('gone')); look()")
    wait_for(lambda: browser.evaluate("at('overall').textContent") == "unreachable", "it says so")


def test_page_can_be_used_without_seeing_it(start_gateway, engine, browser):
    gateway = start_gateway()
    gateway.wait_ready()
    browser.view(1280, 800)
    browser.open(f"{gateway.url}/")
    wait_for(lambda: browser.evaluate("at('overall')?.textContent") == "ready", "it is ready")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in tree if not node.get("ignored")]
    for role in ("main", "banner", "contentinfo", "heading", "status", "meter", "table", "columnheader"):
        assert role in roles, role
    meter = next(n for n in tree if n["role"]["value"] == "meter" and not n.get("ignored"))
    assert meter["name"]["value"] == "K/V blocks in use"
