"""Whether an agent failed because its node's proxy did: then it is not the agent's failure, and execute is tried again.

Looks at the record, at the proxy's processes, and at the proxy itself. What follows is `execute`'s affair.
"""

from __future__ import annotations

import time

import httpx
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from polar.db import transaction
from polar.models import Completion, Proxy
from polar.stages.base import Job

SETTLES_SECONDS = 5.0
"""A living proxy has noted by then what became of a call whose agent is gone."""
BACK_SECONDS = 60.0
LOOK_SECONDS = 0.2


def proxy_fault(job: Job) -> str | None:
    """What the proxy did to this attempt's agent at its end, in words; None if it did nothing."""
    until = time.monotonic() + SETTLES_SECONDS
    while True:
        with transaction(job.database) as db:
            last = _last_call(db, job)
            new = _new_process(db, job, last)
        if last is None or last.outcome != "asked" or new or time.monotonic() >= until:
            break
        job.cancelled.wait(LOOK_SECONDS)
    if last is not None and last.outcome == "asked":
        return f"the proxy of node {job.node.id} died with call {last.id} in flight"
    if last is not None and last.outcome == "failed" and (last.error or {}).get("blame") == "node":
        return f"the proxy of node {job.node.id} could not answer call {last.id}"
    if new:
        return f"the proxy of node {job.node.id} was started again after the agent's last answer"
    if not _answers(job.node.url):
        return f"the proxy of node {job.node.id} does not answer"
    return None


def await_proxy(job: Job) -> None:
    """Return once the node's proxy answers again, or after some patience: an attempt without it would be wasted."""
    until = time.monotonic() + BACK_SECONDS
    while not job.cancelled.is_set() and not _answers(job.node.url) and time.monotonic() < until:
        job.cancelled.wait(LOOK_SECONDS)


def _last_call(db: Session, job: Job) -> Completion | None:
    mine = (Completion.session_id == job.session.id, Completion.attempt == job.session.attempt)
    return db.scalar(select(Completion).where(*mine).order_by(Completion.seq.desc()).limit(1))


def _new_process(db: Session, job: Job, last: Completion | None) -> bool:
    """Whether one of the proxy's processes began after the agent's last answer; where it got none, after the agent."""
    answered = last is not None and last.outcome in ("answered", "aborted")
    since = last.finished_at if last is not None and answered else job.session.claimed_at
    # The row's clock is the database's, and so is the claim's; a completion's is this node's, and may differ a little.
    newer = select(func.count()).where(Proxy.node_id == job.node.id, Proxy.started_at > since)
    return bool(db.scalar(newer))


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).is_success
    except httpx.HTTPError:
        return False
