"""Tries an installed pd-cluster: runs `up` in this folder, streams one answer, sends Ctrl-C. Prints how long each took.

python scripts/smoke.py [--browser] [--goal SECONDS] /path/to/pd-cluster

--browser asks in the dashboard's playground, opened by the link that `up` prints in a headless chromium that is already
running; needs the package playwright. --goal: fail if the first token comes later than so many seconds after the start
of `up`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable

READY_S = ANSWER_S = END_S = 120.0
QUESTION = "What is 3 + 4?"
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

Ask = Callable[[int, str], tuple[dict[str, float], str]]  # port, link -> seconds of each part, answer


def free_port() -> int:
    """Returns a free port whose successor is free, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def try_out(program: str, ask: Ask, goal_s: float) -> None:
    """Runs the whole try. Raises SystemExit with the reason if a part fails or takes too long."""
    port, started_s = free_port(), time.monotonic()
    process = subprocess.Popen([program, "up", f"--port={port}"], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("dashboard: "):
                break
        else:
            raise SystemExit("smoke: it ended before it was ready:\n" + "".join(lines[-20:]))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        ready_s = time.monotonic() - started_s
        link = re.search(r"http\S+", lines[-1])
        parts, text = ask(port, link[0] if link else "")
        first_s = ready_s + sum(parts.values())
        if "7" not in text:
            raise SystemExit(f"smoke: 3 + 4 is {text!r}")
        process.send_signal(signal.SIGINT)
        if (status := process.wait(END_S)) != 0:
            raise SystemExit(f"smoke: status {status} after Ctrl-C")
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    print(
        f"smoke: ready {ready_s:.2f} s, {shown}; first token {first_s:.1f} s after the start; answer {text!r}, status 0"
    )
    if goal_s and first_s > goal_s:
        raise SystemExit(f"smoke: {first_s:.1f} s; the goal is {goal_s:g} s")


def ask_over_http(port: int, _: str) -> tuple[dict[str, float], str]:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    asked_s, first_s, text = time.monotonic(), 0.0, ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as answer:
        for line in answer:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                piece = choices[0]["delta"].get("content") or ""
                first_s = first_s or (time.monotonic() - asked_s if piece else 0.0)
                text += piece
    return {"answer begins": first_s}, text


def try_in_browser(program: str, goal_s: float) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=BROWSER_FLAGS)
        page = browser.new_page()
        page.set_default_timeout(1000 * ANSWER_S)

        def ask(_: int, link: str) -> tuple[dict[str, float], str]:
            times_s = [time.monotonic()]
            page.goto(link)
            page.click("nav a[href='#playground']")
            page.fill("textarea[aria-label=Message]", QUESTION)
            times_s.append(time.monotonic())
            page.keyboard.press("Enter")
            said = page.locator(".said:not(.user)")
            expect(said).not_to_be_empty(timeout=1000 * ANSWER_S)
            times_s.append(time.monotonic())
            page.wait_for_selector(".said:not(.user) .quiet")
            return {"page": times_s[1] - times_s[0], "answer begins": times_s[2] - times_s[1]}, said.inner_text()[:1]

        try_out(program, ask, goal_s)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--goal", type=float, default=0.0, metavar="SECONDS")
    given = parser.parse_args()
    if given.browser:
        try_in_browser(given.program, given.goal)
    else:
        try_out(given.program, ask_over_http, given.goal)


if __name__ == "__main__":
    sys.exit(main())
