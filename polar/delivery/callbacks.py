"""Webhooks: a task's result is posted to its callback_url until it is acknowledged or expired.

The body is the original's TaskResult. With a control token it is signed: X-Polar-Signature is the
HMAC-SHA256 of the body, in hex. Any 2xx acknowledges; anything else is tried again with backoff.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import orjson
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from polar.db import transaction
from polar.log import line
from polar.models import Delivery, Task, now

logger = logging.getLogger(__name__)
Render = Callable[[Session, Task], dict[str, Any]]
BATCH = 20
TIMEOUT_SECONDS = 10.0
EXPIRES = timedelta(hours=24)
LONGEST_PAUSE = timedelta(minutes=5)


def deliver_due(database: Engine, render: Render, secret: str = "") -> int:
    """Post everything that is due; how many were acknowledged. `render` makes the TaskResult of a task."""
    with transaction(database) as db:
        due = list(
            db.scalars(
                select(Delivery)
                .where(Delivery.ended_at.is_(None), Delivery.next_at <= now())
                .order_by(Delivery.next_at)
                .limit(BATCH)
                .with_for_update(skip_locked=True)
            )
        )
        for delivery in due:
            # Claimed by moving its time on: a sender that dies in the middle leaves it due again soon.
            delivery.attempts += 1
            delivery.next_at = now() + _pause(delivery.attempts)
    return sum(_deliver(database, delivery, render, secret) for delivery in due)


def _pause(attempts: int) -> timedelta:
    return min(timedelta(seconds=TIMEOUT_SECONDS + 2.0**attempts), LONGEST_PAUSE)


def _deliver(database: Engine, delivery: Delivery, render: Render, secret: str) -> bool:
    with transaction(database) as db:
        body = orjson.dumps(render(db, db.get_one(Task, delivery.task_pk)))
    headers = {"Content-Type": "application/json", "X-Polar-Delivery": str(delivery.id)}
    if secret:
        headers["X-Polar-Signature"] = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    try:
        response = httpx.post(delivery.url, content=body, headers=headers, timeout=TIMEOUT_SECONDS)
        error = None if response.is_success else f"answered {response.status_code}"
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    with transaction(database) as db:
        row = db.get_one(Delivery, delivery.id)
        row.last_error = error
        if error is None:
            row.acknowledged, row.ended_at = True, now()
        elif row.created_at + EXPIRES < now():
            row.ended_at = now()
    if error:
        logger.warning(line("callback not taken", url=delivery.url, attempt=delivery.attempts, error=error))
    return error is None
