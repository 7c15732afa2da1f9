from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sab.errors import UserValueError
from sab.lab.report.page import live
from sab.lab.training import Run
from tests.lab.report.page.test_document import data_of

Answer = tuple[int, dict[str, str], str]


@pytest.fixture
def watched(trained: Run, tmp_path: Path) -> Run:
    shutil.copytree(trained.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.fixture
def port(watched: Run) -> Iterator[int]:
    with serving(watched) as port:
        yield port


@contextlib.contextmanager
def serving(run: Run) -> Iterator[int]:
    with live.server(live.Watch(run.path), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str = "/", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, dict(answer.headers), answer.read().decode()
    connection.close()
    return found


def test_the_page_may_ask_its_own_server_alone(port: int) -> None:
    status, headers, page = get(port)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src &#x27;self&#x27;" in page
    assert data_of(page)["live"] is True


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1", "127.0.0.1.example.org:{port}", "localhost:1"])
def test_other_hosts_are_refused(port: int, host: str) -> None:
    status, _, content = get(port, Host=host.format(port=port))
    assert status == 403
    assert "<" not in content


def test_localhost_is_this_machine(port: int) -> None:
    assert get(port, "/part", Host=f"localhost:{port}")[0] == 200


def test_there_is_nothing_else(port: int) -> None:
    assert get(port, "/../config.json")[0] == 404


def test_a_connection_that_does_not_ask_is_ended(monkeypatch: pytest.MonkeyPatch, watched: Run) -> None:
    """Whether it is silent or sends a letter now and then; others are answered meanwhile."""
    monkeypatch.setattr(live, "LONGEST_REQUEST", 3.0)
    with serving(watched) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            assert get(port)[0] == 200
            slow.settimeout(0.05)
            began, ended = time.monotonic(), False
            while not ended and time.monotonic() - began < 30:
                try:
                    slow.sendall(b"G")
                    ended = slow.recv(1) == b""
                except TimeoutError:
                    pass
                except OSError:
                    ended = True
            assert ended
        assert silent.recv(1) == b""
        assert get(port)[0] == 200


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch, watched: Run) -> None:
    monkeypatch.setattr(live, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(live, "LONGEST_REQUEST", 600.0)
    with serving(watched) as port, contextlib.ExitStack() as opened:
        held = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(3)]
        assert held[2].recv(1) == b""  # closed at once, though it would have minutes
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            get(port)
        for one in held:
            one.close()
        for _ in range(100):
            with contextlib.suppress(OSError):
                if get(port)[0] == 200:
                    break
            time.sleep(0.1)
        else:
            pytest.fail("there is no room again")


def test_a_page_that_cannot_be_made_is_told_of(
    monkeypatch: pytest.MonkeyPatch, port: int, watched: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("hostile\x1b[2J")

    monkeypatch.setattr(live.document, "part", fail)
    status, _, content = get(port, "/part")
    assert (status, content) == (503, "hostile\\x1b[2J")
    assert capsys.readouterr().err == ""


def test_only_loopback_is_listened_on(watched: Run) -> None:
    with live.server(live.Watch(watched.path), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_what_is_new_is_served(port: int, watched: Run) -> None:
    _, headers, before = get(port, "/part")
    assert get(port, "/part", If_None_Match=headers["ETag"])[0] == 304
    line = json.loads((watched.path / "metrics.jsonl").read_text().splitlines()[-1])
    watched.log(line | {"step": 6})
    status, _, after = get(port, "/part", If_None_Match=headers["ETag"])
    assert status == 200
    (figure,) = data_of(after)["figures"].values()
    assert figure["data"][-1]["x"] == [2, 4, 6]
    assert data_of(after)["explorers"] == data_of(before)["explorers"]


def test_a_new_checkpoint_is_a_new_moment(port: int, watched: Run) -> None:
    checkpoint = max(watched.checkpoints.iterdir())
    contents = json.loads((checkpoint / "state.json").read_text())
    later = watched.checkpoints / "step-00000009"
    shutil.copytree(checkpoint, later)
    contents["state"]["step"] = 9
    contents.pop("digest")  # as an older version wrote it
    (later / "state.json").write_text(json.dumps(contents))
    (made,) = data_of(get(port, "/part")[2])["explorers"]
    assert [moment["iteration"] for moment in made["moments"]] == [4, 9]


def test_a_run_that_is_gone_is_told(port: int, watched: Run) -> None:
    shutil.rmtree(watched.path)
    status, _, content = get(port, "/part")
    assert status == 503
    assert "there is no such folder" in content


def test_a_port_that_is_taken(watched: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserValueError, match=f"port must be one that is free; {port} is not: "):
            live.serve(watched.path, port, pytest.fail)
    with pytest.raises(UserValueError, match="port must be a whole number of at least 0, and at most 65535"):
        live.serve(watched.path, 65536, pytest.fail)
