"""`sab report` and `sab watch`, from the command line."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sab.lab import cli
from sab.lab.training import Run

Capture = pytest.CaptureFixture[str]


def mistake(capsys: Capture, *arguments: str | Path) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def test_a_report(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(trained.path)]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert cli.main(["report", str(trained.path), "-o", "other/page.htm"]) == 0
    assert Path("report.html").read_text() == Path("other/page.htm").read_text()


def test_mistakes(trained: Run, tmp_path: Path, capsys: Capture) -> None:
    assert mistake(capsys, "report") == "sab: RUN must be given at least once; got none.\n"
    nowhere = (
        "must be the folder of a run, of runs or of records, or a file of benchmark records; there is no such folder"
    )
    assert mistake(capsys, "report", "nowhere") == f"sab: RUN 'nowhere' {nowhere}.\n"
    assert mistake(capsys, "report", trained.path, "-o", "a.pdf") == "sab: --out must end in .html; got 'a.pdf'.\n"
    told = mistake(capsys, "report", trained.path, "-o", "/dev/null/a.html")
    assert told.startswith("sab: --out '/dev/null/a.html' must be a place that can be written to; it is not: ")
    assert "RUN 'nowhere' must be the folder of a run; there is no such folder" in mistake(capsys, "watch", "nowhere")
    assert "--port must be a whole number of at least 0" in mistake(capsys, "watch", trained.path, "--port", "-1")


def test_a_watch_ends_by_ctrl_c(trained: Run) -> None:
    command = [sys.executable, "-m", "sab", "watch", str(trained.path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout
            line = watch.stdout.readline()
            found = re.fullmatch(rf"{trained.path} is at http://127.0.0.1:(\d+)/; Ctrl-C ends the watch.\n", line)
            assert found, line
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]))
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
            connection.close()
            watch.send_signal(signal.SIGINT)
            out, errors = watch.communicate(timeout=60)
        finally:
            watch.kill()
    assert (watch.returncode, out, errors) == (0, "\n", "")
