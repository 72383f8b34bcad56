"""The REST API as a Flask app: the factory only wires.

Persists tasks and reads results; sessions are moved by `lifecycle`, work is published by the dispatcher
that the process hands in.
"""

from __future__ import annotations

from typing import Any

import orjson
from flask import Flask
from flask.json.provider import JSONProvider

from polar import admin
from polar.api import auth, docs, metrics, nodes, openapi, policy, problems, recorder, results, sessions, tasks, weights
from polar.db import connect
from polar.dispatch import Dispatcher
from polar.settings import Settings


class FastJSON(JSONProvider):
    """Token arrays are large; orjson writes them an order of magnitude faster."""

    def dumps(self, obj: Any, **_: Any) -> str:
        return orjson.dumps(obj, option=orjson.OPT_SERIALIZE_NUMPY).decode()

    def loads(self, s: str | bytes, **_: Any) -> Any:
        return orjson.loads(s)


def create_app(settings: Settings, dispatcher: Dispatcher) -> Flask:
    """The app on the settings' database; `dispatcher` publishes after commits."""
    app = Flask("polar")
    app.json = FastJSON(app)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_mb << 20
    app.config["POLAR"] = settings
    app.config["DATABASE"] = connect(settings.database_url, pool_size=settings.api_threads)
    app.config["DISPATCHER"] = dispatcher
    problems.register(app)
    auth.register(app)
    app.register_blueprint(tasks.blueprint)
    app.register_blueprint(results.blueprint)
    app.register_blueprint(sessions.blueprint)
    app.register_blueprint(recorder.blueprint)
    app.register_blueprint(nodes.blueprint)
    app.register_blueprint(policy.blueprint)
    app.register_blueprint(weights.blueprint)
    app.register_blueprint(openapi.blueprint)
    app.register_blueprint(docs.blueprint)
    metrics.register(app)
    admin.register(app)
    return app
