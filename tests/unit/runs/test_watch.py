"""`etude watch`: pages that follow their runs, for this machine alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote

import pytest

from etude.cli.looking import present_runs, watch
from etude.errors import ConfigError, EtudeError
from etude.runs.directory import Run
from etude.runs.watch import RunWatch, make_server
from tests.served import ServedPages
from tests.unit.runs.strict_page import Page


def make_run(directory: Path, loss: float = 0.5) -> Run:
    run = Run(directory)
    run.set_status("running", step=0)
    with run.metrics() as metrics:
        for step in (10, 20):
            metrics.write(step, {"train/loss": loss, "eval/loss": loss})
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "first").dir]


@pytest.fixture
def served(runs: list[Path]) -> Iterator[ServedPages]:
    with ServedPages(make_server(RunWatch(lambda: runs, lambda run: []), 0)) as made:
        yield made


def read(served: ServedPages, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    status, content, found = served.get(path, **headers)
    return status, content.decode(), found


def test_the_report_of_one_run_follows_it(served: ServedPages, runs: list[Path]) -> None:
    code, before, headers = read(served, "/")
    assert code == 200
    assert read(served, "/", If_None_Match=headers["ETag"])[0] == 304
    with Run(runs[0]).metrics() as metrics:
        metrics.write(30, {"train/loss": 0.125})
    code, after, _ = read(served, "/", If_None_Match=headers["ETag"])
    assert code == 200 and "0.125" in after and "0.125" not in before
    assert "connect-src 'self'" in after and "refreshes by itself" in " ".join(Page(after).text)


def test_several_runs_are_side_by_side_and_each_has_its_report(
    served: ServedPages, runs: list[Path], tmp_path: Path
) -> None:
    runs.append(make_run(tmp_path / "second run").dir)
    _, html, _ = read(served, "/")
    page = Page(html)
    assert [text for tag, given in page.tags if tag == "a" and (text := given["href"])] == [
        "/compare", "/run/first", "/run/second%20run",
    ]  # fmt: skip
    assert page.attributes("class").count("panel glance") == 2
    code, report, _ = read(served, "/run/second%20run")
    assert code == 200 and "second run" in " ".join(Page(report).text) and 'href="/"' in report
    code, comparison, _ = read(served, "/compare")
    assert code == 200 and "second run against" not in comparison and "Comparison of runs" in comparison


def test_how_far_a_run_has_come_is_seen_beside_whatever_it_measures(
    served: ServedPages, runs: list[Path], tmp_path: Path
) -> None:
    runs.append(make_run(tmp_path / "second").dir)
    for run in runs:
        with Run(run).metrics() as metrics:
            metrics.write(30, {f"{part}/{name}": 0.5 for part in ("train", "eval") for name in ("accuracy", "error")})
    text = " ".join(Page(read(served, "/")[1]).text)
    assert text.count("Steps") == text.count("Duration") == 2 and text.count("eval/loss") == 2


def test_runs_of_one_name_in_two_folders_each_have_their_report(
    served: ServedPages, runs: list[Path], tmp_path: Path
) -> None:
    runs[:] = [make_run(tmp_path / part / "seed-0", loss).dir for part, loss in (("slow", 0.25), ("fast", 0.125))]
    page = Page(read(served, "/")[1])
    assert page.attributes("href")[1:] == ["/run/slow%2Fseed-0", "/run/fast%2Fseed-0"]
    assert {"slow/seed-0", "fast/seed-0"} <= {text.strip() for text in page.text}
    for address, loss in (("/run/slow%2Fseed-0", "0.25"), ("/run/fast%2Fseed-0", "0.125")):
        code, report, _ = read(served, address)
        assert code == 200 and loss in report


def test_only_pages_that_there_are_and_only_for_this_machine(served: ServedPages, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    for path in ("/run/../secret", "/run/secret", "/run/..%2f..%2fetc%2fpasswd", "/etc/passwd", "/compare"):
        assert read(served, path)[0] == 404
    assert read(served, "/", Host="evil.example")[0] == 403
    assert read(served, "/", Host=f"localhost:{served.port}")[0] == 200


def test_names_cannot_speak_to_the_page(served: ServedPages, runs: list[Path], tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    run = make_run(tmp_path / evil)
    run.set_status("failed", error=evil)
    runs.append(run.dir)
    _, html, _ = read(served, "/")
    assert "<img" not in html and html.count("<script") == 1
    assert evil in " ".join(Page(html).text)
    assert read(served, f"/run/{quote(evil, safe='')}")[0] == 200


def test_a_browser_that_leaves_and_nonsense_are_not_worth_a_word(
    served: ServedPages, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        line = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        line.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        line.close()
    assert read(served, "/", Host="[::1")[0] == 403
    assert read(served, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_one_sentence(served: ServedPages) -> None:
    with pytest.raises(ConfigError, match="--port 0 takes a free one"):
        make_server(RunWatch(list, lambda run: []), served.port)


def test_runs_that_match_later_appear_and_deleted_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = make_run(tmp_path / "runs/lr-1")
    with ServedPages(make_server(RunWatch(lambda: present_runs(["lr-*"]), lambda run: []), 0)) as served:
        assert "<h1>lr-1</h1>" in read(served, "/")[1]
        make_run(tmp_path / "runs/lr-2")
        make_run(tmp_path / "runs/unasked")
        text = " ".join(Page(read(served, "/")[1]).text)
        assert "lr-1" in text and "lr-2" in text and "unasked" not in text
        shutil.rmtree(first.dir)
        assert "<h1>lr-2</h1>" in read(served, "/")[1]
        shutil.rmtree(tmp_path / "runs/lr-2")
        assert "No run yet" in read(served, "/")[1]


def test_a_folder_that_is_no_run_is_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    with pytest.raises(EtudeError, match="configs is not a run"):
        watch(["configs"], port=0, open_page=False)


@pytest.mark.slow
def test_the_command_serves_what_is_running_and_ends_with_control_c(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "stale-one").set_status("finished", step=20)
    make_run(tmp_path / "runs" / "new")
    command = [sys.executable, "-m", "etude", "watch", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    (port,) = re.findall(r"watching runs/ at http://127\.0\.0\.1:(\d+)/", line)
    connection = HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("GET", "/")
    page = connection.getresponse().read().decode()
    connection.close()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert "stopped watching" in out
    assert "<h1>new</h1>" in page and "stale-one" not in " ".join(Page(page).text)
