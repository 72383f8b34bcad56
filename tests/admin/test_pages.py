"""Every page over rows as a run leaves them: what it shows, what it never does, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from flask import Flask
from sqlalchemy import Engine, event

from polar.db import transaction
from polar.models import Task
from tests.admin.conftest import Browser
from tests.admin.rows import lane_is_there, open_task, put_trace, run

PAGES = (
    "/admin/",
    "/admin/?span=7d",
    "/admin/tasks",
    "/admin/tasks?state=running&harness=shell&evaluator=command&order=name&age=24h",
    "/admin/tasks/{task}",
    "/admin/tasks/{task}/spec",
    "/admin/tasks/{task}/cancel",
    "/admin/sessions",
    "/admin/sessions?state=completed&lane=gpu0",
    "/admin/sessions/{session}",
    "/admin/sessions/{waiting}",
    "/admin/sessions/{session}?call={root}",
    "/admin/sessions/{waiting}/cancel",
    "/admin/sessions/{session}/traces/0",
    "/admin/sessions/{session}/traces/0?colour=version&view=table&from=3",
    "/admin/completions/{completion}",
    "/admin/completions/{completion}?view=asked",
    "/admin/completions/{completion}?view=sent",
    "/admin/completions/{completion}?view=answered",
    "/admin/compare",
    "/admin/compare?a={session}&b={waiting}",
    "/admin/nodes",
    "/admin/nodes/node-1/drain",
    "/admin/policy",
    "/admin/policy/pause",
    "/admin/keys",
    "/admin/help",
    "/admin/flower/",
)
FRAGMENTS = (
    "/admin/live/overview",
    "/admin/live/tasks/{task}",
    "/admin/live/sessions/{session}",
    "/admin/live/sessions/{session}/conversation",
    "/admin/live/nodes",
    "/admin/live/policy",
)
HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(2)> \u202egnp.exe\u202c \u200b" + "x" * 300_000


class Markup(HTMLParser):
    """Reads a page as a browser does, and notes what our pages must never have."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "script" and not (values.get("src") or "").startswith("/admin/static/"):
            self.wrong.append("a script inside")
        self.wrong += [f"{tag} {name}" for name in values if name.startswith("on") or name == "style"]
        for name in ("href", "src", "action", "hx-get"):
            if (value := values.get(name)) is not None:
                if name != "action":
                    self.links.append(value)
                if not value.startswith(("/admin/", "#")):
                    self.wrong.append(f"{tag} leads to {value}")
        if identifier := values.get("id"):
            self.ids.append(identifier)


def read(text: str) -> Markup:
    """A page, read."""
    markup = Markup()
    markup.feed(text)
    return markup


@contextmanager
def counted(app: Flask) -> Iterator[list[str]]:
    """The statements that the pages run while inside."""
    seen: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(app.config["DATABASE"], "before_cursor_execute", note)
    yield seen
    event.remove(app.config["DATABASE"], "before_cursor_execute", note)


def test_every_page_opens(browser: Browser, story: dict[str, str]) -> None:
    """It answers, says where it is, runs nothing from inside itself and leads nowhere outside."""
    for path in (*PAGES, *FRAGMENTS):
        answer = browser.get(path.format(**story))
        assert answer.status_code == 200, (path, answer.text[-500:])
        page = read(answer.text)
        assert page.wrong == [], path
        assert len(page.ids) == len(set(page.ids)), (path, "an id stands twice")
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
        if path in PAGES:
            assert answer.text.count("<h1") == 1, path
            assert 'id="main"' in answer.text and 'class="skip"' in answer.text


def test_every_link_of_every_page_leads_somewhere(browser: Browser, story: dict[str, str]) -> None:
    """From the overview on, no link is broken."""
    seen: set[str] = set()
    waiting = ["/admin/"]
    while waiting:
        path = waiting.pop()
        if path in seen or len(seen) > 250:
            continue
        seen.add(path)
        answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.status_code)
        if answer.mimetype == "text/html" and "flower" not in path:
            waiting += [link.partition("#")[0] for link in read(answer.text).links if link.startswith("/admin/")]
    assert len(seen) > 60
    assert any("/completions/" in path for path in seen)


def test_an_empty_page_says_what_to_do(browser: Browser) -> None:
    """Before anything was run, each page names the command that changes that."""
    for path in ("/admin/", "/admin/tasks", "/admin/sessions", "/admin/nodes", "/admin/policy"):
        assert re.search(r"<code>(polar|celery) ", browser.text(path)), path


MISSING = (
    "/admin/nowhere",
    "/admin/tasks/none",
    "/admin/sessions/none",
    "/admin/completions/none",
    "/admin/sessions/{session}/traces/7",
    "/admin/sessions/{session}/logs/1/none",
    "/admin/sessions/{session}/logs/1/..%2F..%2Fapi_key",
    "/admin/tasks/%00",
    "/admin/tasks/{task}?row=none",
)


def test_what_is_not_there_is_said_as_a_page(browser: Browser, story: dict[str, str]) -> None:
    """404, in the pages' own form, with a way back."""
    for path in MISSING:
        answer = browser.get(path.format(**story))
        assert answer.status_code == 404, path
        assert "To the overview" in answer.text and "Traceback" not in answer.text


def test_what_an_agent_wrote_is_shown_and_not_obeyed(browser: Browser, database: Engine) -> None:
    """Scripts are text; characters that hide or turn the text are written out, long lines are cut."""
    lane_is_there(database)
    (session,) = open_task(database, "hostile", instruction=HOSTILE[:200])
    first, last = run(database, session, HOSTILE + "\0end")
    places = (
        f"/admin/sessions/{session}",
        f"/admin/completions/{last}",
        f"/admin/completions/{first}?view=asked",
        f"/admin/completions/{last}?view=answered",
        f"/admin/compare?a={session}&b={session}",
        "/admin/tasks/hostile",
        "/admin/tasks?q=<script>alert(1)</script>",
    )
    for path in places:
        text = browser.text(path)
        assert read(text).wrong == []
        assert "<script>alert" not in text and "<img src=x" not in text and "\u202e" not in text
        assert len(text) < 1_200_000, path
    assert "U+202E" in browser.text(f"/admin/sessions/{session}")
    whole = browser.get(f"/admin/completions/{last}/raw/message-3")
    assert whole.headers["Content-Disposition"].startswith("attachment")
    assert whole.text == HOSTILE + "\0end"


def test_secrets_of_a_task_are_masked(browser: Browser, database: Engine) -> None:
    """Variables, and what is named like a secret, never reach a page."""
    agent = {"harness": "shell", "custom_shell": {"command": "true"}, "env": {"TOKEN": "very-secret-1"}}
    metadata = {"api_key": "very-secret-2", "note": "plain"}
    open_task(database, "secrets", agent=agent, metadata=metadata, callback_url="http://u:very-secret-3@host/x")
    text = browser.text("/admin/tasks/secrets/spec")
    assert "very-secret" not in text and "plain" in text and "TOKEN" in text


def test_lists_go_forth_and_back(browser: Browser, database: Engine) -> None:
    """Walking 130 tasks to their end and back shows each once, in order, whatever the order is."""
    with transaction(database) as db:
        for number in range(130):
            spec = {"agent": {"harness": "shell"}, "instruction": "", "builder": {"strategy": "x"}}
            db.add(Task(task_id=f"t{number:03}", state="running", spec=spec, num_samples=0))
    for order in ("newest", "oldest", "name"):
        page = f"/admin/tasks?order={order}"
        pages = []
        while True:
            text = browser.text(page)
            pages.append(re.findall(r'class="name" href="/admin/tasks/(t\d+)', text))
            following = re.search(r'href="([^"]+)" rel="next"', text)
            if following is None:
                break
            page = following[1].replace("&amp;", "&")
        shown = [name for each in pages for name in each]
        expected = sorted(shown, reverse=order == "newest")
        assert len(shown) == 130 and shown == expected and [len(each) for each in pages] == [50, 50, 30]
        back = re.search(r'href="([^"]+)" rel="prev"', text)
        assert back
        before = browser.text(back[1].replace("&amp;", "&"))
        assert re.findall(r'class="name" href="/admin/tasks/(t\d+)', before) == pages[1]


def test_a_wrong_cursor_begins_anew(browser: Browser, story: dict[str, str]) -> None:
    """A cursor that nobody gave out is no error."""
    for cursor in ("x", ">[1,2]", '>["a"]', ">{}", "<", '>["2026-01-01", "zzz"]'):
        assert browser.get("/admin/sessions", query_string={"at": cursor}).status_code == 200
        assert browser.get("/admin/tasks", query_string={"at": cursor}).status_code == 200


def test_finding(browser: Browser, database: Engine, story: dict[str, str]) -> None:
    """Part of a name finds tasks, wildcards are letters, the beginning of a session's id opens it."""
    open_task(database, "other_name", agent={"harness": "mini_swe_agent"}, evaluator=None, metadata={"group_id": "g7"})
    assert "other_name" in browser.text("/admin/tasks?q=HER_N")
    assert "other_name" not in browser.text("/admin/tasks?q=%25x")
    assert "No task is like that" in browser.text("/admin/tasks?q=%25")
    for query in ("harness=mini_swe_agent", "group=g7", "state=running&order=oldest"):
        assert "other_name" in browser.text(f"/admin/tasks?{query}")
    assert "other_name" not in browser.text("/admin/tasks?evaluator=command")
    answer = browser.get(f"/admin/tasks?q={story['session'][:12]}")
    assert answer.location == f"/admin/sessions/{story['session']}"


def test_a_page_runs_as_many_statements_for_many_rows_as_for_few(
    app: Flask, browser: Browser, database: Engine, story: dict[str, str]
) -> None:
    """No page asks once for each row."""
    paths = [path.format(**story) for path in (*PAGES, *FRAGMENTS)]
    few = {}
    for path in paths:
        with counted(app) as seen:
            browser.text(path)
        few[path] = len(seen)
    for number in range(12):
        for session in open_task(database, f"more-{number}", samples=3):
            run(database, session)
    for path in paths:
        with counted(app) as seen:
            browser.text(path)
        assert len(seen) <= few[path], (path, few[path], len(seen))
        assert len(seen) <= 24, (path, len(seen))


def test_tokens_are_the_traces_own(browser: Browser, story: dict[str, str]) -> None:
    """Each token stands at its place with its id, mask, log-probability and version; a page may begin anywhere."""
    page = f"/admin/sessions/{story['session']}/traces/0"
    titles = re.findall(r'class="t ([a-z0-9 ]+)" title="([^"]+)"', browser.text(page + "?colour=version"))
    stream = titles[-15:]
    assert [int(re.match(r"#(\d+)", title)[1]) for _, title in stream] == list(range(15))  # type: ignore[index]
    assert [int(re.search(r"id (\d+)", title)[1]) for _, title in stream] == [*range(40, 45), *range(60, 70)]  # type: ignore[index]
    kinds = [names.split()[0] for names, _ in stream]
    assert kinds == ["p"] * 5 + ["on"] * 4 + ["c"] * 4 + ["on"] * 2
    assert "log-probability -0.5000 (60.65%) · policy 1" in stream[5][1]
    assert "policy 2" in stream[13][1] and "policy" not in stream[9][1]
    assert "begin" in stream[5][0].split() and "begin" in stream[13][0].split()
    later = browser.text(page + "?from=12&size=250&view=table")
    assert re.findall(r'data-name="Id">(\d+)', later) == ["67", "68", "69"]
    assert browser.get(page + "?from=999999").status_code == 200


def test_a_large_trace_is_read_a_page_at_a_time(app: Flask, browser: Browser, database: Engine) -> None:
    """Of 60,000 tokens, the page has those that were asked for, on both sides of the prompt's end."""
    (session,) = open_task(database, "large")
    prompt, response = np.arange(20_000) % 900, np.arange(40_000) % 901
    with transaction(database) as db:
        put_trace(db, session, prompt, response, [1] * 40_000, "large", [])
    text = browser.text(f"/admin/sessions/{session}/traces/0?from=19900&size=250&view=table")
    ids = [int(each) for each in re.findall(r'data-name="Id">(\d+)', text)]
    assert ids == [*prompt[19_900:].tolist(), *response[:150].tolist()]
    assert "No tokenizer" in browser.text(f"/admin/sessions/{session}/traces/0")


def test_logs_are_those_of_the_session(app: Flask, browser: Browser, story: dict[str, str]) -> None:
    """A log is shown in pieces, and a link that stands among the logs is not followed."""
    home: Path = app.config["POLAR"].home_path
    folder = home / "logs" / "sessions" / story["session"] / "attempt-1"
    folder.mkdir(parents=True)
    (home / "api_key").write_text("the key of this home")
    (folder / "agent.stdout").write_text("begin\n" + "line\n" * 30_000 + "<b>end</b>\n")
    (folder / "leak").symlink_to(home / "api_key")
    page = browser.text(f"/admin/sessions/{story['session']}")
    assert "agent.stdout" in page and "leak" not in page
    text = browser.text(f"/admin/sessions/{story['session']}/logs/1/agent.stdout")
    assert "&lt;b&gt;end&lt;/b&gt;" in text and "begin\n" not in text
    assert "begin\n" in browser.text(f"/admin/sessions/{story['session']}/logs/1/agent.stdout?from=0")
    assert browser.get(f"/admin/sessions/{story['session']}/logs/1/leak").status_code == 404


def test_a_call_is_shown_against_its_parent(browser: Browser, story: dict[str, str]) -> None:
    """What is new in the second call is the tool's answer; the first call has all of it new."""
    text = browser.text(f"/admin/completions/{story['completion']}")
    assert "3 messages as in" in text and text.count("+ added") == 1
    root = browser.text(f"/admin/completions/{story['root']}")
    assert "It goes on from no other call" in root and root.count("+ added") == 2
    prompt = browser.get(f"/admin/completions/{story['completion']}/raw/prompt.txt")
    assert prompt.status_code == 200 and prompt.headers["X-Content-Type-Options"] == "nosniff"
