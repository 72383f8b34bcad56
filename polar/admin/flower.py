"""Flower behind the pages' login: requests are passed on to this machine's Flower, which has a password of its own.

`polar flower` starts it with that password, which both sides make of the pages' secret; nobody has to know it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import httpx
from flask import Response, current_app, request
from werkzeug.wrappers import Response as AnyResponse

from polar.admin.keys import for_admins
from polar.admin.login import signing_key
from polar.admin.page import PREFIX, blueprint, page
from polar.settings import Settings

PATH = f"{PREFIX}/flower"
USER = "polar"
PASSED = ("accept", "content-type", "x-requested-with", "x-xsrftoken", "if-none-match", "if-modified-since")
RETURNED = ("content-type", "location", "etag", "last-modified", "cache-control")
SECONDS = 30.0
CSP = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
"""Flower's own pages have scripts inside; ours have none."""


def password(settings: Settings) -> str:
    """What `polar flower` is started with, and what this page sends."""
    return hmac.new(signing_key(settings), b"flower", hashlib.sha256).hexdigest()


def _own_forms(view: Any) -> Any:
    # Its forms carry its own token; that the request comes from its pages is told by the browser.
    view.own_forms = True
    return view


@blueprint.route("/flower/", defaults={"rest": ""}, methods=["GET", "POST"], endpoint="flower")
@blueprint.route("/flower/<path:rest>", methods=["GET", "POST"], endpoint="flower_page")
@for_admins
@_own_forms
@page("admin/flower.html")
def flower(rest: str) -> dict[str, Any] | AnyResponse:
    """Whatever Flower answers; a page that says how to start it where it does not."""
    settings: Settings = current_app.config["POLAR"]
    headers = {name: value for name in PASSED if (value := request.headers.get(name))}
    cookies = {name: value for name, value in request.cookies.items() if name == "_xsrf"}
    try:
        answer = httpx.request(
            request.method,
            f"http://127.0.0.1:{settings.flower_port}{PATH}/{rest}",
            params=list(request.args.items(multi=True)),
            content=request.get_data(),
            headers=headers,
            cookies=cookies,
            auth=(USER, password(settings)),
            timeout=SECONDS,
        )
    except httpx.HTTPError:
        return {"message": f"No Flower answers on port {settings.flower_port} of this machine."}
    if answer.status_code == 401:
        why = "has another password: start both with the same home folder, or set POLAR_PAGES_SECRET for both"
        return {"message": f"The Flower on port {settings.flower_port} {why}."}
    back = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
    response = Response(answer.content, answer.status_code, headers={**back, "Content-Security-Policy": CSP})
    for name, value in answer.cookies.items():
        response.set_cookie(name, value, path=PATH, samesite="Lax", secure=request.is_secure)
    return response
