"""Webhooks: results are posted to a task's callback_url until they are acknowledged or expired.

A task's body is the original's TaskResult, a session's its SessionResult; what makes them is handed in. Any 2xx
acknowledges; anything else, a redirect too, is tried again with growing pauses. What is sent twice has the same
X-Polar-Delivery, so a receiver can tell.

With a secret, X-Polar-Signature is `t=<unix time>,v1=<hex>`: HMAC-SHA256 of `<t>.<body>`. The time is signed along, so
that a receiver can refuse what somebody recorded and sends again; each attempt is signed anew.

Posts run beside each other, a few to each URL, each with a bound on its whole time: a receiver that hangs, or that
answers a byte a second, holds up its own results and nobody else's. One round runs at a time in a process, so that
hanging receivers never take the threads that the sweeper needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import aiohttp
import orjson
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from yarl import URL

from polar.db import transaction
from polar.errors import SpecError
from polar.log import line
from polar.models import Delivery, now

logger = logging.getLogger(__name__)
Render = Callable[[Session, Delivery], dict[str, Any]]
AT_ONCE = 12
AT_ONCE_TO_ONE_URL = 4
TIMEOUT_SECONDS = 30.0
ROUND_SECONDS = 60.0
LOOK_SECONDS = 0.5
CLAIM_GRACE_SECONDS = 30.0
EXPIRES = timedelta(hours=24)
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
_one_round = threading.Lock()


def sign(secret: str, body: bytes, moment: int) -> str:
    """The X-Polar-Signature of a body that is sent at this moment."""
    code = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={code}"


def check_url(url: str, allow: str, *, field: str = "callback_url", setting: str = "POLAR_CALLBACK_ALLOW") -> None:
    """Whether callbacks, or what else `field` names, may go there; `allow` is the setting. Raises SpecError.

    Read by the parser that posts: what the check takes for the host is the host that is called."""
    try:
        parsed = URL(url)
    except ValueError as error:
        raise SpecError.at(field, f"is no URL: {error}") from None
    host = (parsed.host or "").lower().rstrip(".")
    if not host:
        raise SpecError.at(field, "names no host")
    allowed = [each.strip().lower() for each in allow.split(",") if each.strip()]
    if allowed and not any(host == each or each.startswith("*.") and host.endswith(each[1:]) for each in allowed):
        raise SpecError.at(field, f"may not go to {host!r}; {setting} has the hosts")


def deliver_due(
    database: Engine, render: Render, secret: str = "", allow: str = "", timeout: float = TIMEOUT_SECONDS
) -> int:
    """Post everything that is due; how many were acknowledged. `render` makes the body of a delivery."""
    if not _one_round.acquire(blocking=False):
        return 0
    try:
        return asyncio.run(_Round(database, render, secret, allow, timeout).run())
    finally:
        _one_round.release()


class _Round:
    """Posts a few at a time, until nothing is due or the round has lasted long enough."""

    def __init__(self, database: Engine, render: Render, secret: str, allow: str, timeout: float) -> None:
        self.database, self.render = database, render
        self.secret, self.allow, self.timeout = secret, allow, timeout

    async def run(self) -> int:
        end = time.monotonic() + ROUND_SECONDS
        taken = 0
        sending: dict[asyncio.Task[bool], str] = {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout)) as http:
            while True:
                while len(sending) < AT_ONCE and time.monotonic() < end:
                    busy = [url for url, count in Counter(sending.values()).items() if count >= AT_ONCE_TO_ONE_URL]
                    due = await asyncio.to_thread(self._claim, busy)
                    if due is None:
                        break
                    sending[asyncio.create_task(self._deliver(http, *due))] = due[1]
                if not sending:
                    return taken
                # Not for longer: what falls due meanwhile must not wait for a receiver that hangs.
                done, _ = await asyncio.wait(set(sending), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                taken += sum(each.result() for each in done)
                sending = {each: url for each, url in sending.items() if each not in done}

    def _claim(self, busy: list[str]) -> tuple[uuid.UUID, str] | None:
        with transaction(self.database) as db:
            query = select(Delivery).where(
                Delivery.ended_at.is_(None), Delivery.next_at <= now(), Delivery.url.not_in(busy)
            )
            due = db.scalar(query.order_by(Delivery.next_at).limit(1).with_for_update(skip_locked=True))
            if due is None:
                return None
            due.attempts += 1
            # Claimed by moving its time past the attempt: a sender that dies in the middle leaves it due again.
            due.next_at = now() + timedelta(seconds=self.timeout + CLAIM_GRACE_SECONDS)
            return due.id, due.url

    async def _deliver(self, http: aiohttp.ClientSession, delivery_id: uuid.UUID, url: str) -> bool:
        error = await self._post(http, delivery_id, url)
        try:
            await asyncio.to_thread(self._note, delivery_id, error)
        except SQLAlchemyError as failure:
            error = f"could not be noted, and will be sent again: {type(failure).__name__}"
        if error:
            logger.warning(line("callback not taken", delivery=delivery_id, host=URL(url).host, error=error))
        return error is None

    async def _post(self, http: aiohttp.ClientSession, delivery_id: uuid.UUID, url: str) -> str | None:
        """None if it was acknowledged, else why not."""
        try:
            check_url(url, self.allow)
            body, event = await asyncio.to_thread(self._body, delivery_id)
        except SpecError as error:
            return error.message
        except Exception as bug:
            # One result that cannot be made must not hold up the others.
            logger.exception(line("callback could not be made", delivery=delivery_id))
            return f"its body could not be made: {type(bug).__name__}"
        headers = {"Content-Type": "application/json", "X-Polar-Delivery": str(delivery_id), "X-Polar-Event": event}
        if self.secret:
            headers["X-Polar-Signature"] = sign(self.secret, body, int(time.time()))
        try:
            # Redirects are not followed: they would lead past the allow-list.
            async with http.post(url, data=body, headers=headers, allow_redirects=False) as response:
                return None if 200 <= response.status < 300 else f"answered {response.status}"
        except TimeoutError:
            return f"no answer within {self.timeout:g} s"
        except (aiohttp.ClientError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _body(self, delivery_id: uuid.UUID) -> tuple[bytes, str]:
        with transaction(self.database) as db:
            delivery = db.get_one(Delivery, delivery_id)
            return orjson.dumps(self.render(db, delivery)), "task" if delivery.session_id is None else "session"

    def _note(self, delivery_id: uuid.UUID, error: str | None) -> None:
        with transaction(self.database) as db:
            row = db.get(Delivery, delivery_id, with_for_update=True)
            if row is None:  # deleted with its task, meanwhile
                return
            row.last_error = error
            if error is None:
                row.acknowledged, row.ended_at = True, now()
            elif row.created_at + EXPIRES < now():
                row.ended_at = now()
            else:
                row.next_at = now() + pause(row.attempts)


def pause(attempts: int) -> timedelta:
    """How long to wait after so many attempts: doubled each time, less a random part, so that none come in step."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE_SECONDS)
    return timedelta(seconds=longest * random.uniform(0.5, 1.0))
