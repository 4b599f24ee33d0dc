"""Tries an installed pd-cluster: `up` in this folder, one streamed question, Ctrl-C. Prints how long each took.

python scripts/smoke.py /path/to/pd-cluster
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

READY_S = ANSWER_S = END_S = 120.0


def free_port() -> int:
    """Returns a port whose successor is free, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def main(program: str) -> None:
    """Raises SystemExit with one line if anything is not as it should be."""
    port, started_s = free_port(), time.monotonic()
    process = subprocess.Popen([program, "up", f"--port={port}"], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.match("ready after", line):
                break
        else:
            raise SystemExit("smoke: it ended before it was ready:\n" + "".join(lines[-20:]))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        ready_s = time.monotonic() - started_s
        first_s, text = ask(port)
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
    print(f"smoke: ready after {ready_s:.1f} s, first token {first_s:.2f} s later; answer {text!r}, status 0")


def ask(port: int) -> tuple[float, str]:
    """Returns the time to the first token, in seconds, and the whole answer."""
    body = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0, "stream": True}
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
    return first_s, text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
