"""Test the pages by requests, without a port: access, contents, and text that looks like HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.ui.folders import STARTED, write_run
from zlaunch.queue.daemon import queue_folder
from zlaunch.queue.schedule import Demand
from zlaunch.queue.store import Store, Submission
from zlaunch.ui.access import PageAccess
from zlaunch.ui.board import Board
from zlaunch.ui.server import make_app

PLANTED = "<script>alert('planted')</script>"
ACCESS = PageAccess(80)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return Path("runs")


@pytest.fixture
def stranger(folder: Path) -> Iterator[TestClient]:
    """A browser without the token."""
    app = make_app(Board(folder), ACCESS)
    yield TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


@pytest.fixture
def browser(stranger: TestClient) -> TestClient:
    stranger.cookies.set(ACCESS.cookie, ACCESS.token)
    return stranger


class _Parts(HTMLParser):
    """Collects what a page would run or load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.loaded += [
            value or "" for name, value in attrs if name == "src" or (name == "href" and tag == "link")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_without_the_token(stranger: TestClient) -> None:
    for path in (
        "/",
        "/run?name=x",
        "/queue",
        "/live.js",
        "/ui.css",
        "/nothing",
        "/?token=",
        "/?token=wrong",
    ):
        answer = stranger.get(path)
        assert answer.status_code == 403 and "<" not in answer.text, path
    stranger.cookies.set(ACCESS.cookie, "wrong")
    assert stranger.get("/").status_code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    first = stranger.get(f"/run?name=a%26b&token={ACCESS.token}")
    assert (first.status_code, first.headers["location"]) == (303, "/run?name=a%26b")
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie
    assert stranger.get("/").status_code == 200
    elsewhere = f"http://127.0.0.1//evil.example/?token={ACCESS.token}"
    assert stranger.get(elsewhere).headers["location"] == "/evil.example/"


def test_another_sites_name_is_refused_even_with_the_token(browser: TestClient) -> None:
    answer = browser.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert browser.get(f"/?token={ACCESS.token}", headers={"host": "evil.example"}).status_code == 403


def test_every_answer_forbids_foreign_scripts_and_frames(browser: TestClient) -> None:
    for path in ("/", "/queue", "/live.js", "/nothing"):
        headers = browser.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
    assert browser.post("/").status_code == 405, "the pages change nothing"


def test_the_list(browser: TestClient, folder: Path) -> None:
    assert "No runs yet" in browser.get("/").text
    write_run(folder, "good")
    write_run(folder, "bad", exit_code=3, started=STARTED + 1)
    (folder / "torn").mkdir()
    (folder / "torn" / "launcher.json").write_text("[]")
    page = browser.get("/").text
    assert page.index("bad") < page.index("good") < page.index("torn")
    assert page.count('<svg class="spark"') == 2 and '<progress max="3" value="3">' in page
    assert "ended 3" in page and "its launcher.json cannot be read" in page
    parts = _Parts(page)
    assert sorted(parts.loaded) == ["/live.js", "/report.css", "/ui.css", "data:,"]
    part = browser.get("/?part=main").text
    assert part in page and "<header" not in part


def test_a_comparison_lists_what_differs(browser: TestClient, folder: Path) -> None:
    for name, rate, stage in (("one", "1e-4", 2), ("two", "-1", 3)):
        command = ["--detach", "train.py", "--lr", rate, "--seed=5", *(["--tiny"] if name == "two" else [])]
        about = {"type": "environment", "rank": 0, "torch": "2.11", "limits": {"matmul_tflops": stage}}
        path = write_run(folder, name, command=command, events=[{**about, "time": STARTED}])
        config = {"zero_optimization": {"stage": stage}, "note": PLANTED * (stage - 2), "seed": 1}
        (path / "config.effective.json").write_text(json.dumps({"config": config}))
    write_run(folder, "three", command=["--detach", "train.py", "--lr", "1e-4", "--seed=5"])
    page = browser.get("/compare", params={"run": ["one", "two"]}).text
    table = page[page.index("<h2>Differences</h2>") : page.index("<h2>Curves</h2>")]
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", table)
    assert cells[:9] == ["Arguments", "one", "two", "--lr", "1e-4", "-1", "--tiny", "not set", "set"]
    assert cells[9:15] == ["Config", "one", "two", "zero_optimization.stage", "2", "3"]
    assert cells[15:17] == ["note", ""] and "planted" in cells[17] and len(cells) == 18
    assert "<script" not in table, "values are escaped"
    page = browser.get("/compare", params={"run": ["one", "three"]}).text
    assert "--lr" not in page[page.index("Differences") : page.index("Curves")]


def test_a_runs_page_and_a_comparison(browser: TestClient, folder: Path) -> None:
    write_run(folder, "one", log="the last line\n")
    write_run(folder, "two/inner", steps=5)
    page = browser.get("/run", params={"name": "one"})
    assert "<h3>Loss</h3>" in page.text and "the last line" in page.text and "train.py --lr 1" in page.text
    assert page.headers["x-poll"] == "0.0", "nothing comes after its end"
    both = browser.get("/compare", params={"run": ["one", "two/inner", "one"]}).text
    assert "one: loss" in both and "two/inner: loss" in both and both.count("<h2>Run ") == 2
    assert browser.get("/compare").status_code == 400
    assert browser.get("/compare", params={"run": [str(n) for n in range(9)]}).status_code == 400
    missing = browser.get("/run", params={"name": PLANTED})
    assert missing.status_code == 404 and "there is no run" in missing.text and "planted" in missing.text
    assert _Parts(missing.text).tags.count("script") == 1


def test_text_that_looks_like_html_stays_text(browser: TestClient, folder: Path) -> None:
    name = "\"><script>alert('planted')<"  # a name cannot have a slash
    events = [
        {
            "type": "exception",
            "rank": 0,
            "host": PLANTED,
            "exception": PLANTED,
            "traceback": PLANTED,
            "time": 2e9,
        },
        {"type": "metrics", "rank": 0, "host": "n1", "time": 2e9, "values": {"step": 4, PLANTED: 1.0}},
        {"type": "checkpoint", "tag": PLANTED, "time": 2e9},
    ]
    path = write_run(folder, name, log=PLANTED, events=events, command=[PLANTED], hosts=[PLANTED])
    (path / "config.effective.json").write_text(json.dumps({"config": {PLANTED: PLANTED}}))
    for answer in (
        browser.get("/"),
        browser.get("/run", params={"name": name}),
        browser.get("/compare", params={"run": [name, name]}),
    ):
        parts = _Parts(answer.text)
        assert answer.status_code == 200 and "planted" in parts.text
        assert (
            parts.tags.count("script") == 1
            and not parts.handlers
            and set(parts.loaded) <= {*("/live.js", "/ui.css", "/report.css", "data:,")}
        )


def test_names_that_are_no_text(browser: TestClient, folder: Path) -> None:
    write_run(folder, "caf\udce9")
    assert browser.get("/").status_code == 200
    assert browser.get("/run", params={"name": "caf\\udce9"}).status_code == 200


def test_the_queue_and_a_sweep(browser: TestClient, folder: Path, tmp_path: Path) -> None:
    empty = browser.get("/queue").text
    assert "The queue is empty" in empty and "No sweeps" in empty
    sweep = tmp_path / "sweeps" / "lr"
    write_run(sweep, "001", steps=2, command=[PLANTED])
    write_run(sweep, "002", steps=4)
    values = [{"--lr": 0.1, PLANTED: 1}, {"--lr": 0.2}, {"--lr": 0.3}]
    space = {"trials": values, "metric": "loss", "goal": "min", "early_stopping": None}
    (sweep / "sweep.json").write_text(json.dumps({"queue": "local", "command": [], "space": space}))
    asked = Submission(
        run_id="x",
        run_dir=str(sweep / "001"),
        options=(),
        command=("train.py", PLANTED),
        cwd="/",
        umask=0o22,
        demand=Demand({"n1": (0,)}, 1, 1),
        names={},
    )
    store = Store(queue_folder())
    store.add(asked, {})
    page = browser.get("/queue").text
    assert "sweeps/lr/001" in page and "waiting" in page and "/sweep?name=sweeps%2Flr" in page
    table = browser.get("/sweep", params={"name": "sweeps/lr"}).text
    assert table.index(">2</a>") < table.index(">1</a>") < table.index("<td>3</td>"), "the best first"
    for text in (page, table):
        assert "planted" in text and _Parts(text).tags.count("script") == 1
    opened = browser.get("/run", params={"name": "sweeps/lr/001"})
    assert opened.status_code == 200 and "<h3>Loss</h3>" in opened.text
    assert browser.get("/sweep", params={"name": "other"}).status_code == 404
    (sweep / "sweep.json").write_text('{"space": 3}')
    broken = browser.get("/sweep", params={"name": "sweeps/lr"})
    assert broken.status_code == 404 and "sweep.json cannot be read" in broken.text
