"""Who may see and do what: keys, cookies, forged forms, and actions that ask first."""

from __future__ import annotations

import re
from urllib.parse import unquote

from flask import Flask
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from polar import keys
from polar.admin.login import OPEN_ENDPOINTS
from polar.db import transaction
from polar.models import ApiKey, Node, Policy, RolloutSession, Task
from tests.admin.conftest import Browser, key_with

ACTIONS = (
    "/admin/nodes/node-1/drain",
    "/admin/policy/pause",
    "/admin/tasks/{task}/cancel",
)


def standing(database: Engine, story: dict[str, str]) -> tuple[str, str, bool, str | None]:
    """What the actions change: the session, its task, the node and the gate."""
    with Session(database) as db:
        session = db.get_one(RolloutSession, story["waiting"])
        node = db.get_one(Node, "node-1")
        task = db.scalars(select(Task.state).where(Task.task_id == story["task"])).one()
        return session.state, task, node.draining, db.scalar(select(Policy.gate))


def test_a_stranger_sees_the_login_alone(stranger: Browser, story: dict[str, str]) -> None:
    """Every page leads to the login, which leads back; a fragment tells the page to go there."""
    for path in ("/admin/", "/admin/tasks", f"/admin/sessions/{story['session']}", "/admin/keys", "/admin/flower/"):
        answer = stranger.get(path)
        assert (answer.status_code, unquote(answer.location)) == (303, f"/admin/login?next={path}")
        assert "Redirecting" in answer.text
    fragment = stranger.get("/admin/live/overview", headers={"HX-Request": "true"})
    assert (fragment.status_code, fragment.headers["HX-Redirect"]) == (401, "/admin/login")
    assert all(stranger.get(path).location.endswith("/admin/") for path in ("/", "/admin"))


def test_every_route_of_the_pages_leads_a_stranger_to_the_login(app: Flask, stranger: Browser) -> None:
    """Each page, with every word of its address filled in, and none that was forgotten."""
    rules = [rule for rule in app.url_map.iter_rules() if rule.endpoint.startswith("admin.")]
    shown = [rule for rule in rules if rule.endpoint not in OPEN_ENDPOINTS and "GET" in (rule.methods or ())]
    for rule in shown:
        path = re.sub(r"<uuid:\w+>", "12345678-1234-5678-1234-567812345678", rule.rule)
        path = re.sub(r"<(?:path:)?\w+>", "x", re.sub(r"<int:\w+>", "1", path))
        answer = stranger.get(path)
        assert (answer.status_code, answer.location.split("?")[0]) == (303, "/admin/login"), path
    assert len(shown) > 30


def test_logging_in(stranger: Browser, database: Engine) -> None:
    """A wrong key and one without `read` are refused with the reason; a good one opens the page that was asked for."""
    assert "unknown or revoked" in stranger.log_in("polar-wrong").text
    assert "lacks the scope" in stranger.log_in(key_with(database, "submit")).text
    answer = stranger.log_in(key_with(database, "read"), "/admin/tasks?state=failed")
    assert (answer.status_code, answer.location) == (303, "/admin/tasks?state=failed")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Path=/admin" in cookie
    assert stranger.get("/admin/tasks").status_code == 200


def test_a_login_leads_nowhere_else(app: Flask, database: Engine) -> None:
    """Whatever follows the login is a page of ours."""
    key = key_with(database, "read")
    for following in ("https://evil.example/", "//evil.example", "/admin//evil.example", "/admin/\\evil", "/tasks", ""):
        assert Browser(app.test_client()).log_in(key, following).location == "/admin/"


def test_a_cookie_has_no_key_and_opens_no_api(stranger: Browser, database: Engine) -> None:
    """The key is not in the cookie, and the cookie is nothing to the REST API."""
    key = key_with(database, "read", "admin")
    answer = stranger.log_in(key)
    assert key not in answer.headers["Set-Cookie"]
    value = re.match(r"polar_pages=([^;]+)", answer.headers["Set-Cookie"])
    assert value
    for path in ("/tasks", "/nodes", "/rollout/policy"):
        assert stranger.get(path, headers={"Cookie": f"polar_pages={value[1]}"}).status_code == 401


def test_a_revoked_key_ends_its_logins(browser: Browser, database: Engine) -> None:
    """With the next request."""
    with transaction(database) as db:
        row = db.scalars(select(ApiKey)).one()
    assert browser.send(f"/admin/keys/{row.id}/revoke").status_code == 303
    assert browser.get("/admin/tasks").location.startswith("/admin/login")


def test_the_link_of_the_command_line(app: Flask, stranger: Browser, database: Engine) -> None:
    """An API key in the header buys a link that logs in; a cookie does not, and a spoiled link does nothing."""
    key = key_with(database, "read")
    assert stranger.client.post("/admin/ticket").status_code == 401
    path = stranger.client.post("/admin/ticket", headers={"Authorization": f"Bearer {key}"}).json["path"]
    assert stranger.get(path[:-2] + "xx").location == "/admin/login"
    assert stranger.get("/admin/tasks").status_code == 303
    assert stranger.get(path).location == "/admin/"
    assert stranger.get("/admin/tasks").status_code == 200


def test_an_action_asks_first_and_works_without_scripts(
    browser: Browser, database: Engine, story: dict[str, str]
) -> None:
    """Opening it changes nothing; sending its form does it, and the next page says so."""
    for path in ACTIONS:
        before = standing(database, story)
        assert browser.token(path.format(**story))
        assert standing(database, story) == before
        answer = browser.send(path.format(**story))
        assert answer.status_code == 303
        assert standing(database, story) != before, path
        assert 'role="status"' in browser.text(answer.location)


def test_what_was_taken_out_comes_back(browser: Browser, database: Engine, story: dict[str, str]) -> None:
    """A drained node and a closed gate, the latter shown on every page while it is closed."""
    browser.send("/admin/nodes/node-1/drain")
    browser.send("/admin/policy/pause", mode="abort")
    assert standing(database, story)[2:] == (True, "abort")
    assert "Generation is paused on every node (abort)" in browser.text("/admin/tasks")
    browser.send("/admin/nodes/node-1/undrain")
    browser.send("/admin/policy/resume")
    assert standing(database, story)[2:] == (False, "open")
    assert "Generation is paused" not in browser.text("/admin/tasks")


def test_a_forged_form_does_nothing(browser: Browser, database: Engine, story: dict[str, str]) -> None:
    """Without the token, with another's, or sent from another site."""
    token = browser.token("/admin/policy")
    before = standing(database, story)
    forged = (({}, None), ({"csrf": "x" * 32}, "same-origin"), ({"csrf": token}, "cross-site"))
    for path in (*ACTIONS, "/admin/keys", "/admin/logout"):
        for fields, site in forged:
            form = {"name": "forged", "scopes": "admin", **fields}
            headers = {"Sec-Fetch-Site": site} if site else {}
            answer = browser.client.post(path.format(**story), data=form, headers=headers)
            assert answer.status_code == 403 and "nothing was done" in answer.text
    assert standing(database, story) == before
    with Session(database) as db:
        assert "forged" not in db.scalars(select(ApiKey.name)).all()
    assert browser.get("/admin/tasks").status_code == 200


def test_scopes(app: Flask, stranger: Browser, database: Engine, story: dict[str, str]) -> None:
    """`read` sees, `submit` may cancel too, and only `admin` may drain, pause, see keys and Flower."""
    stranger.log_in(key_with(database, "read", "submit"))
    for path in ("/admin/nodes/node-1/drain", "/admin/policy/pause"):
        assert stranger.send(path).status_code == 403
    assert stranger.get("/admin/keys").status_code == stranger.get("/admin/flower/").status_code == 403
    assert stranger.send(f"/admin/sessions/{story['waiting']}/cancel").status_code == 303
    assert standing(database, story)[0] == "cancelled"
    assert stranger.send("/admin/logout", form="/admin/tasks").location == "/admin/login"
    assert stranger.get("/admin/tasks").status_code == 303
    reader = Browser(app.test_client())
    reader.log_in(key_with(database, "read"))
    assert reader.send(f"/admin/tasks/{story['task']}/cancel").status_code == 403


def test_a_key_is_shown_once(browser: Browser, database: Engine) -> None:
    """The page that makes it shows it; no page ever does again, and it works until it is revoked."""
    answer = browser.send("/admin/keys", name="trainer <b>", scopes=["read", "submit", "nonsense"])
    (key,) = set(re.findall(r"polar-[A-Za-z0-9_\-]{43}", answer.text))
    assert key not in browser.text("/admin/keys") and "trainer &lt;b&gt;" in browser.text("/admin/keys")
    with transaction(database) as db:
        found = keys.find(db, key)
        assert found is not None and found.scopes == ["submit", "read"]
    browser.send(f"/admin/keys/{found.id}/revoke")
    with transaction(database) as db:
        assert keys.find(db, key) is None
    assert "Give the key a name" in browser.send("/admin/keys", name=" ", scopes="read").text
    assert "at least one scope" in browser.send("/admin/keys", name="x").text


def test_an_open_polar_needs_no_login(app: Flask, story: dict[str, str]) -> None:
    """Where the API asks for no key, neither do the pages; forms are checked all the same."""
    object.__setattr__(app.config["POLAR"], "auth", "open")
    browser = Browser(app.test_client())
    assert "tasks" in browser.text("/admin/")
    assert browser.client.post("/admin/policy/pause").status_code == 403
    assert browser.send("/admin/policy/pause").status_code == 303


def test_colours_are_kept_in_a_cookie(browser: Browser) -> None:
    """The toggle works without scripts and leads back to where it was used."""
    answer = browser.send("/admin/theme", form="/admin/tasks", theme="dark", back="/admin/tasks?state=failed")
    assert answer.location == "/admin/tasks?state=failed"
    assert 'data-theme="dark"' in browser.text("/admin/tasks")
