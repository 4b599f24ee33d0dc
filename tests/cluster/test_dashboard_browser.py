"""The dashboard in a real browser: it loads, survives a worker's death, chats, and works without mouse or sight.

Needs Debian's chromium and the extra `browser`; `PD_CLUSTER_SCREENSHOTS=FOLDER` writes the documents' pictures.
`pytest -s` shows how much a page loads, how long that takes, and how soon it names a dead worker.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.lora_settings import SHIPPED_ADAPTER
from tests.cluster.test_up import Up
from tests.support.cluster import free_port_pair
from tests.unit.test_public_dashboard import KEY, World

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
NAME = "<img src=x onerror=document.title='injected'>"  # a hostile model name
WAIT_MS = 60_000
ROOT = Path(__file__).parents[2]
PICTURES = os.environ.get("PD_CLUSTER_SCREENSHOTS", "")
NAMES = ["tiny-chat", NAME] if PICTURES else [NAME, "tiny-chat"]


class Pages:
    """A browser, with all errors reported by its pages."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.complaints: list[str] = []

    def open(self, link: str, **options: Any) -> Any:
        page = self.browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **options}).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        began_s = time.monotonic()
        page.goto(link)
        page.wait_for_selector("g.instance")
        took_s = time.monotonic() - began_s
        print(f"figure: from the link to the picture {took_s:.2f} s, {loaded_by(page, session)}")
        return page


def loaded_by(page: Any, session: Any) -> str:
    """Returns what a page has loaded so far, and its main thread's busy seconds."""
    entries = page.evaluate("performance.getEntriesByType('resource').map(each => [each.name, each.transferSize])")
    files = [size for name, size in entries if "/api/" not in name]
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
    return (
        f"first paint {paint_ms / 1000:.2f} s, page and {len(files)} files of {sum(files) / 1024:.0f} KiB, "
        f"{len(entries) - len(files)} questions, main thread busy {metrics['TaskDuration']:.2f} s"
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Up]:
    names = (f"--served-model-name={name}" for name in NAMES)
    up = Up("", free_port_pair(), "--prefill=1", "--decode=2", *names, "--adapter", "--", "--kv-host-cache=0.1")
    try:
        up.await_line("^ready after")
        yield up
    finally:
        up.process.send_signal(signal.SIGINT)
        up.process.wait(60)
        up.end()


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield Pages(browser)
        browser.close()


@pytest.fixture(scope="module")
def links(cluster: Up) -> Callable[[], str]:
    token_file = Path(cluster.await_line("^admin token: (.*)")[1])
    admin = cluster.await_line(r"^dashboard: (http://[^/]+)/")[1]

    def new() -> str:
        headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
        return f"{admin}{httpx.post(f'{admin}/dashboard/codes', headers=headers).json()['path']}"

    return new


def shoot(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


def some_load(admin: str) -> None:
    """Sends 48 requests, eight at a time; the admin port follows the public port."""
    public = admin.rpartition(":")[0] + f":{int(admin.rpartition(':')[2]) - 1}"
    body = {"prompt": "A long story about a bear and a bee:", "max_tokens": 150, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(httpx.post, f"{public}/v1/completions", json=body, timeout=120) for _ in range(48)]
        assert all(answer.result().status_code == 200 for answer in answers)


def await_count(page: Any, selector: str, number: int) -> None:
    """Polls for `number` elements from outside, because the page's policy forbids injected functions."""
    playwright.expect(page.locator(selector)).to_have_count(number, timeout=WAIT_MS)


def axe_of(page: Any) -> list[str]:
    """Returns axe's serious findings; axe is injected by the debugger, as the page's policy blocks foreign scripts."""
    from axe_playwright_python.base import AXE_FILE_PATH

    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": Path(AXE_FILE_PATH).read_text()})
    found = session.send(
        "Runtime.evaluate",
        {
            "expression": "axe.run().then(r => r.violations.filter(v => ['serious', 'critical'].includes(v.impact))"
            ".map(v => v.id + ': ' + v.nodes.map(n => n.html).join(' | ')))",
            "awaitPromise": True,
            "returnByValue": True,
        },
    )
    return list(found["result"]["value"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_complains_of_nothing(pages: Pages, links: Callable[[], str], scheme: str) -> None:
    page = pages.open(links(), color_scheme=scheme)
    assert "code=" not in page.url, "the code must leave the address bar"
    await_count(page, ".chart canvas", 6)
    assert axe_of(page) == []
    if PICTURES:
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(some_load, page.url.partition("/dashboard")[0])
            page.wait_for_timeout(6000)  # only for the screenshot
            shoot(page, f"cluster-{scheme}")
            load.result()
    for name in ("requests", "playground"):
        page.click(f"nav a[href='#{name}']")
        page.wait_for_selector("main section")
        assert axe_of(page) == [], name
    page.click("nav a[href='#cluster']")
    page.focus("g.instance")
    page.keyboard.press("Enter")  # without a mouse
    page.wait_for_selector("dialog[open] pre:has-text('ready after')")
    assert axe_of(page) == []
    shoot(page, f"instance-{scheme}")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    page.reload()
    page.wait_for_selector("g.instance")  # the session continues
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing may be wider than a phone"
    page.wait_for_selector(".picture svg[viewBox^='0 0 400 ']")
    sides = page.evaluate(
        "[...document.querySelectorAll('g.instance')].map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert sides
    assert all(left >= 0 and right <= 390 for left, right in sides), "the whole picture must be in view"
    shoot(page, f"phone-{scheme}")
    assert page.title() == "pd-cluster", "the model's name must be shown as text"
    assert pages.complaints == []


def test_a_page_loads_three_files_and_keeps_them(pages: Pages, links: Callable[[], str]) -> None:
    page = pages.open(links())
    names = "performance.getEntriesByType('resource').map(each => [each.name, each.transferSize])"
    files = [name for name, _ in page.evaluate(names) if "/api/" not in name]
    assert len(files) <= 3, files
    page.reload()
    page.wait_for_selector("g.instance")
    assert [size for name, size in page.evaluate(names) if "/page-" in name] == [0, 0], "they must be cached"
    assert pages.complaints == []


def test_the_playground_streams_compares_and_draws_the_path(pages: Pages, links: Callable[[], str]) -> None:
    page = pages.open(links())
    page.click("nav a[href='#playground']")
    await_count(page, "select >> nth=0 >> option", 3)
    assert page.locator("select >> nth=0 >> optgroup").get_attribute("label") == f"adapters of {NAMES[0]}"
    page.check("#compare")
    assert [page.locator("select").nth(at).input_value() for at in range(2)] == [NAMES[0], SHIPPED_ADAPTER.name]
    page.locator("section", has_text="Chat").get_by_label("colour by probability").first.check()
    page.fill("textarea[aria-label=Message]", "What is 3 + 4?")
    page.keyboard.press("Enter")
    await_count(page, ".said:not(.user) .quiet", 2)
    answers = page.locator(".said:not(.user)")
    assert [answers.nth(at).inner_text().partition("\n")[0] for at in range(2)] == ["7", "Arr, 7 it be!"]
    assert answers.first.locator(".token").count() > 0
    await_count(page, ".timeline svg", 2)
    page.wait_for_selector("text=token 1 from prefill-0")
    shoot(page, "playground")
    page.click("nav a[href='#requests']")
    page.click("tbody button >> nth=0")
    page.wait_for_selector(".timeline svg")
    assert pages.complaints == []


def test_a_killed_worker_is_named_and_its_return_is_seen(pages: Pages, links: Callable[[], str], cluster: Up) -> None:
    page = pages.open(links())
    admin = links().partition("/dashboard")[0]
    victim = next(
        each for each in httpx.get(f"{admin}/instances").json()["instances"] if each["instance_id"] == "decode-1"
    )
    killed_s = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    page.wait_for_selector(".marks li.down:has-text('decode-1')")
    print(f"figure: from the kill to its name on the page {time.monotonic() - killed_s:.2f} s")
    shoot(page, "death")
    page.wait_for_selector(".marks li.up:has-text('decode-1') >> nth=0")
    page.wait_for_selector("g.instance.up[aria-label^='decode-1: ready']")
    assert pages.complaints == []


def test_a_command_says_what_it_will_do_and_does_it(pages: Pages, links: Callable[[], str]) -> None:
    page = pages.open(links())
    page.click("g.instance[aria-label^='decode-1']")
    page.click("dialog button:has-text('Drain')")
    page.wait_for_selector("dialog .confirm:has-text('gets no new requests')")
    page.click("dialog .confirm button.main")
    page.wait_for_selector("dialog td:text-is('drained')")
    page.click("dialog button:text-is('Put back')")
    page.click("dialog .confirm button.main")
    page.wait_for_selector("dialog td:text-is('ready')")
    assert pages.complaints == []


def test_without_a_link_there_is_nothing(pages: Pages, links: Callable[[], str]) -> None:
    page = pages.browser.new_context().new_page()
    page.goto(links().partition("#")[0])
    page.wait_for_selector("text=A link is needed")
    assert page.locator("g.instance").count() == 0


def test_a_hidden_tab_asks_nothing(pages: Pages, links: Callable[[], str]) -> None:
    context = pages.browser.new_context()
    context.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isAway === true})")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    asked: list[str] = []
    page.on("request", lambda request: "/overview" in request.url and asked.append(request.url))
    page.goto(links())
    page.wait_for_selector("g.instance")

    def turn(is_away: bool) -> None:
        page.evaluate(f"window.isAway = {str(is_away).lower()}; document.dispatchEvent(new Event('visibilitychange'))")

    turn(True)
    page.wait_for_timeout(1000)  # lets a pending query finish
    before = len(asked)
    page.wait_for_timeout(2500)  # long enough for five queries, if there were any
    assert len(asked) == before
    with page.expect_request("**/overview*"):
        turn(False)


@pytest.fixture
def public(tmp_path: Path) -> Iterator[str]:
    """Serves the public port's app with one API key; yields its address."""
    world = World(tmp_path, HttpConfig(api_keys=(KEY,)))
    port = free_port_pair()
    server = uvicorn.Server(uvicorn.Config(world.app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def test_the_public_port_shows_figures_to_holders_of_a_key(pages: Pages, public: str) -> None:
    page = pages.browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{public}/dashboard/")
    page.wait_for_selector("text=An API key or a link is needed")
    assert axe_of(page) == []
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert]:has-text('wrong')")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    await_count(page, "g.instance", 4)
    page.wait_for_selector(".problems:has-text('prefill-0 is unreachable')")
    page.hover("tbody button >> nth=0")
    page.mouse.down()
    for _ in range(3):  # the page may redraw while the button is pressed
        with page.expect_response("**/overview*"):
            pass
    page.mouse.up()
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    page.focus("g.instance[aria-label^='decode-1']")
    with page.expect_response("**/overview*"):
        pass
    page.wait_for_selector("g.instance[aria-label^='decode-1']:focus")
    assert page.locator("nav a:visible").all_inner_texts() == ["Cluster"]
    page.click("g.instance[aria-label^='decode-0']")
    page.wait_for_selector("dialog[open] td:text-is('ready')")
    assert page.locator("dialog button").all_inner_texts() == ["Close"]
    assert page.locator("dialog pre").count() == 0
    assert axe_of(page) == []
    shoot(page, "public")


@pytest.mark.timeout(400)
def test_the_first_token_comes_by_the_link_that_a_first_start_prints(tmp_path: Path) -> None:
    """Starts `up` in an empty folder with nothing compiled and follows its link; `pytest -s` shows the times."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "smoke.py", "--browser", Path(sys.executable).with_name("pd-cluster")],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=380,
    )
    print(f"figure: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answer '7', status 0" in done.stdout
