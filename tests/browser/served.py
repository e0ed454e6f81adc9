"""A server of notebooks in its own folders, and a headless Chromium to look at what it serves."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def served(arguments: list[str], folder: Path, ready: str, seconds: float = 120) -> Iterator[str]:
    """Run `python -m ARGUMENTS` with settings of its own; gives its address once `ready` answers, and ends its tree.

    Args:
        arguments: of Python, with {port} and {token} to be filled in.
        folder: empty, for settings and the log.
        ready: path that answers when the server does.
    """
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    homes = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")}
    env = {**os.environ, **homes, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost"}
    log = (folder / "server.log").open("w")
    command = [sys.executable, "-m", *(a.format(port=port, token=token) for a in arguments)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + seconds
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments[0]} did not come up: {(folder / 'server.log').read_text()[-2000:]}")
            try:
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                opener.open(f"{address}{ready}?token={token}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        yield f"{address}?token={token}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


class Console:
    """What a page's console and uncaught errors say; `errors` leaves out what the servers' own parts say."""

    # Not of this project: a missing favicon, a font that voila's page asks a CDN for, optional services of a bare Lab.
    OTHERS = re.compile(r"favicon|cdn\.jsdelivr\.net|/api/(?:news|lsp|me)|lsp/status|translations|webfont|ERR_INTERNET_DISCONNECTED|jupyterlab-plugin")

    def __init__(self, page):
        self.said: list[str] = []
        page.on("console", lambda m: self.said.append(f"{m.type}: {m.text} ({(m.location or {}).get('url', '')})") if m.type == "error" else None)
        page.on("pageerror", lambda e: self.said.append(f"uncaught: {e}"))

    @property
    def errors(self) -> list[str]:
        """Errors that are not the servers' own."""
        return [line for line in self.said if not self.OTHERS.search(line)]
