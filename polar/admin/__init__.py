"""The admin pages: server-rendered, usable without JavaScript, kept fresh by small fragments where there is some.

One file per noun; a view reads the tables and returns values to its template in `templates/admin/`. Who may see and
do what is `login`'s; how a row is moved is `lifecycle`'s and `policy`'s. Nothing here is an API: programs use the REST
paths.
"""

from __future__ import annotations

from flask import Flask, redirect
from werkzeug.wrappers import Response

from polar.admin import (
    compare,
    completions,
    flower,
    keys,
    login,
    nodes,
    overview,
    policy,
    sessions,
    tasks,
    tokens,
    words,
)
from polar.admin.page import blueprint, prepare

PARTS = (overview, tasks, sessions, tokens, completions, compare, nodes, policy, keys, flower)
"""The nouns; importing one gives the blueprint its views."""
words.prepare(blueprint)


def register(app: Flask) -> None:
    """Put the pages on the app, under /admin, and send `/` there."""
    prepare(app)
    login.prepare(app)
    app.register_blueprint(blueprint)
    app.add_url_rule("/", "front", _front)


def _front() -> Response:
    return redirect("/admin/")
