"""The page kept fresh while a run trains, for browsers on this machine alone."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sab.errors import UserValueError, check_int, printable
from sab.lab.report.page import document, explorer
from sab.lab.report.page.explorer import Explorer
from sab.lab.report.page.material import Material
from sab.lab.report.page.titles import model_name
from sab.lab.training.run import Run

LOOPBACK = "127.0.0.1"
TRACED_STEPS = 600
"""Fewer than in a report: the run that is watched needs the processor."""
MOST_CONNECTIONS = 32
LONGEST_REQUEST = 10.0
"""Seconds in which a connection must have asked for something, and then taken what it asked for."""


class Watch:
    """A run and what was made of it; every new checkpoint adds a moment to the explorer."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._seen: object = None
        self._traced: object = None
        self._explorer: Explorer | None = None
        self._parts = self._renewed()

    def parts(self) -> document.Parts:
        """The page's present parts."""
        with self._lock:
            if _fingerprint(self._path) != self._seen:
                self._parts = self._renewed()
            return self._parts

    def _renewed(self) -> document.Parts:
        seen = _fingerprint(self._path)
        name = str(self._path)
        run = Run.open(self._path)
        if self._traced != _weights(self._path):
            self._traced = _weights(self._path)
            self._explorer = self._explored(run)
        material = Material(runs={name: run})
        made = document.parts(material, [] if self._explorer is None else [self._explorer])
        self._seen = seen
        return made

    def _explored(self, run: Run) -> Explorer:
        earlier = () if self._explorer is None else self._explorer.moments
        made = explorer.of_run_or_reason(model_name(run.config), run, TRACED_STEPS, known=earlier)
        # Without moments where there is no checkpoint yet, or one that is just being replaced.
        return self._explorer if earlier and self._explorer and not made.moments else made


def _fingerprint(path: Path) -> object:
    """What changes whenever a run has something new."""
    files = (path / name for name in ("config.json", "metrics.jsonl", "result.json"))
    return [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()], _weights(path)


def _weights(path: Path) -> list[str]:
    """The names of the weights that a run has."""
    return sorted(str(one) for folder in ("checkpoint", "best") for one in (path / folder).glob("step-*"))


def serve(path: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serves the page of a run until it is interrupted; `ready` is called with the address once it can be opened."""
    port = check_int("port", port, 0, maximum=65535)
    watch = Watch(path)
    with server(watch, port) as made:
        ready(f"http://{LOOPBACK}:{made.server_port}/")
        made.serve_forever(poll_interval=0.2)


class Server(ThreadingHTTPServer):
    """One that whoever can connect cannot occupy: connections have a number and a time.

    A browser has what it asks for in one connection each, some six at once.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self._asking: dict[socket.socket, float] = {}
        """The connections whose request is not read yet, and since when they are open."""
        self._open = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection; where not, it is closed."""
        return self._open.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._asking[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: Any) -> None:
        self.heard(request)
        self._open.release()

    def heard(self, request: Any) -> None:
        """Tells that the request of a connection was read."""
        self._asking.pop(request, None)

    def service_actions(self) -> None:
        """Ends the connections that take too long to ask, also those that send a letter now and then."""
        for request, since in list(self._asking.items()):
            if time.monotonic() - since > LONGEST_REQUEST:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing where a connection broke or took too long; else the traceback of a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def server(watch: Watch, port: int) -> Server:
    """One that listens on this machine's own address alone."""

    class Handler(BaseHTTPRequestHandler):
        timeout = LONGEST_REQUEST  # of each wait, also for whoever does not read the answer

        def do_GET(self) -> None:
            made.heard(self.connection)
            # A foreign page can reach this machine under another host name, but not under these.
            if self.headers.get("Host") not in (f"{LOOPBACK}:{made.server_port}", f"localhost:{made.server_port}"):
                return self._answer(403, "text/plain", "this page is for browsers on this machine")
            contents = {"/": lambda made: document.page(made, is_live=True), "/part": document.part}
            if self.path not in contents:
                return self._answer(404, "text/plain", "there is only the one page")
            try:
                content = contents[self.path](watch.parts())
            except Exception as error:  # the run may have been removed, or hold what no page can
                return self._answer(503, "text/plain", printable(error))
            return self._answer(200, "text/html", content)

        def _answer(self, status: int, kind: str, content: str) -> None:
            body = content.encode()
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            if status == 200 and self.headers.get("If-None-Match") == tag:
                status, body = 304, b""
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("ETag", tag),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
            ):
                self.send_header(name, value)
            try:
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # a browser that does not wait for the end, or does not read
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the command's output is the user's."""

    try:
        made = Server((LOOPBACK, port), Handler)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserValueError(f"port must be one that is free; {port} is not: {reason}.", "port") from error
    return made
