"""The asynchronous client: the same calls as `sync`, awaited. For one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import httpx

from polar.client import calls
from polar.client.calls import UNSET, Call, same
from polar.client.errors import ApiError, ServerError, UnreachableError
from polar.client.feed import PAGE, WAIT_SECONDS, Reader
from polar.client.progress import Progress
from polar.client.retry import NO_RETRY, Attempts, Retry
from polar.client.tracker import Tracker
from polar.client.transport import checked, options, page_call, read, request_of, verdict
from polar.client.types import Accepted, Json, Policy, SessionResult, SessionState, TaskStatus, Trajectory

T = TypeVar("T")
RUN_WAIT_SECONDS = 5.0
"""That a run waits for a result before it looks whether a submit failed."""


class AsyncClient:
    """A running Polar. `key` is an API key; submitting needs the scope `submit`, the policy `admin`."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        key: str | None = None,
        *,
        timeout: float = 60.0,
        retry: Retry = Retry(),
    ) -> None:
        self.url = url.rstrip("/")
        self._retry, self._timeout = retry, timeout
        self._http = httpx.AsyncClient(**options(self.url, key, timeout))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def submit(self, task: Mapping[str, Any], *, idempotency_key: str | None = None) -> Accepted:
        """Submit one task. A key of your own makes a submit safe to repeat after a restart, too."""
        return await self._do(calls.submit(task, idempotency_key))

    async def submit_many(
        self,
        tasks: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        idempotency_key: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> AsyncGenerator[Accepted, None]:
        """Submit tasks, so many at a time; the answers in the order of the tasks, which are drawn as there is room."""
        waiting: deque[asyncio.Task[Accepted]] = deque()
        try:
            for task in tasks:
                if len(waiting) >= concurrency:
                    yield await waiting.popleft()
                waiting.append(asyncio.create_task(self.submit(task, idempotency_key=_key(idempotency_key, task))))
            while waiting:
                yield await waiting.popleft()
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def status(self, task_id: str, *, wait: float = 0.0, full: bool = True) -> TaskStatus:
        """How a task is doing; with `wait`, once it has ended or so many seconds are over (60 at most)."""
        return await self._do(calls.status(task_id, wait, full))

    async def wait(self, task_id: str, *, seconds: float | None = None, full: bool = True) -> TaskStatus:
        """The task once it has ended. Raises TimeoutError."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = WAIT_SECONDS if end is None else end - time.monotonic()
            found = await self.status(task_id, wait=max(0.0, min(WAIT_SECONDS, left)), full=False)
            if found.ended:
                return await self.status(task_id) if full else found
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{task_id} has not ended after {seconds:g} s; it goes on")

    async def cancel(self, task_id: str) -> TaskStatus:
        """Cancel what has not ended of a task; repeating it changes nothing."""
        return await self._do(calls.cancel(task_id))

    async def tasks(
        self, *, status: str | None = None, harness: str | None = None, since: float | None = None, limit: int = 200
    ) -> list[Json]:
        """Tasks in a line each, newest first."""
        return await self._do(calls.tasks(status, harness, since, limit))

    async def results(
        self,
        *,
        after: str | None = None,
        consumer: str | None = None,
        group: str | None = None,
        task_id: str | None = None,
        full: bool = True,
        limit: int = PAGE,
        follow: bool = False,
    ) -> AsyncGenerator[SessionResult, None]:
        """Results of the feed in its order, from `after` or the consumer's place on; with `follow`, without end.

        Lost connections are gone on from. A `consumer` is moved by `ack` alone."""
        reader = Reader(after, consumer, group, task_id, full, limit, WAIT_SECONDS if follow else 0.0)
        came = True
        while came or follow:
            came = False
            async with aclosing(self.page(reader)) as page:
                async for result in page:
                    came = True
                    yield result

    async def ack(self, consumer: str, cursor: str, *, rewind: bool = False) -> str:
        """Move a consumer to a result's cursor: everything up to it is safe. Where it then is."""
        return await self._do(calls.ack(consumer, cursor, rewind))

    async def feed_end(self) -> str:
        """The cursor of a reader who wants only what ends from now on."""
        return await self._do(calls.feed_end())

    async def run(
        self,
        tasks: Iterable[Mapping[str, Any]] | Mapping[str, Any],
        *,
        progress: bool = False,
        concurrency: int = 8,
        group: str | None = None,
        full: bool = True,
        idempotency_key: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> AsyncGenerator[SessionResult, None]:
        """Submit tasks and yield each session's result as it ends, until all have. Left early, the tasks go on.

        Results of other clients' tasks are read and passed by; with `group`, the `metadata.group_id` of all these
        tasks, the server leaves them out."""
        start = await self.feed_end()
        reader = Reader(start, group=group, full=full, wait=RUN_WAIT_SECONDS)
        given = [tasks] if isinstance(tasks, Mapping) else tasks
        with Progress(progress) as bar:
            tracker = Tracker(bar)
            answered: list[Accepted] = []
            expected = (tracker.expect(task) for task in given)
            submitting = self.submit_many(expected, concurrency=concurrency, idempotency_key=idempotency_key)
            aside = asyncio.create_task(_draw(submitting, answered))
            try:
                while not tracker.done:
                    # Whether all was submitted is asked before the page is read: what ended by then is on it.
                    tracker.all_submitted = _over(aside)
                    while answered:
                        accepted = answered.pop()
                        # Had been submitted before, so its first results may lie before this run's beginning.
                        before = (await self.status(accepted.task_id, full=full)).results if accepted.duplicate else []
                        for result in filter(tracker.take, before):
                            yield result
                    if tracker.done:
                        break
                    async with aclosing(self.page(reader)) as page:
                        async for result in page:
                            if tracker.take(result):
                                yield result
            finally:
                aside.cancel()
                await asyncio.gather(aside, return_exceptions=True)

    async def session(self, session_id: str) -> SessionState:
        """Where a session is and how it is doing there."""
        return await self._do(calls.session(session_id))

    async def sessions(self, task_id: str) -> AsyncGenerator[SessionState, None]:
        """A task's sessions as they are now, read a page at a time."""
        after: int | None = -1
        while after is not None:
            rows, after = await self._do(calls.sessions(task_id, after, 500))
            for row in rows:
                yield row

    async def cancel_session(self, session_id: str) -> SessionState:
        """Cancel one session; repeating it changes nothing."""
        return await self._do(calls.cancel_session(session_id))

    async def trajectory(self, session_id: str) -> Trajectory:
        """A session's trajectory with its token arrays."""
        return await self._do(calls.trajectory(session_id))

    async def completions(self, session_id: str) -> AsyncGenerator[Json, None]:
        """A session's captured model calls in order, read a page at a time."""
        after: int | None = 0
        while after is not None:
            rows, after = await self._do(calls.completions(session_id, after, 50))
            for row in rows:
                yield row

    async def events(self, session_id: str) -> list[Json]:
        """Every move of a session."""
        return await self._do(calls.events(session_id))

    async def policy(self) -> Policy:
        """The policy's version and the gate."""
        return await self._do(calls.policy())

    async def set_policy(
        self, version: int | str | None = UNSET, *, name: str = UNSET, max_staleness: int | None = UNSET
    ) -> Policy:
        """Change what is given; `max_staleness=None` takes the bound away."""
        return await self._do(calls.set_policy(version, name, max_staleness))

    async def push(
        self,
        version: int | str,
        path: str,
        *,
        mode: str = "drain",
        lanes: Iterable[str] | None = None,
        probe: Mapping[str, Any] | None = None,
        wait: float = 300.0,
    ) -> Policy:
        """Give every lane's engine the checkpoint at `path`; on an ApiError the gate stays closed: push again.

        `probe` is {prompt_ids, output_ids, logprobs}, scored with the new weights: every engine has to agree."""
        return await self._do(calls.push(version, path, mode, lanes, probe, wait))

    async def pause(self, mode: str = "drain", *, wait: float = 300.0) -> Policy:
        """Hold generation everywhere; returns once nothing is sampled. Raises NotHoldingError, the gate then closed."""
        return await self._do(calls.pause(mode, wait))

    async def resume(self, *, wait: float = 10.0) -> Policy:
        """Let generation go on everywhere."""
        return await self._do(calls.resume(wait))

    async def ready(self) -> bool:
        """Whether Polar is up, its database answers and a lane is alive."""
        try:
            await self._do(calls.ready())
        except (UnreachableError, ServerError):
            return False
        return True

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        wait: float = 0.0,
    ) -> Any:
        """Any other path of the API; the answer's JSON. Sent again like every call: use it for what bears that."""
        return await self._do(Call(method, path, same, params or {}, body, wait=wait))

    async def _do(self, call: Call[T]) -> T:
        attempts = Attempts(self._retry if call.patient else NO_RETRY)
        while True:
            try:
                return read(call, checked(await self._http.send(request_of(self._http, call, self._timeout))))
            except (httpx.TransportError, ApiError) as failure:
                await asyncio.sleep(verdict(attempts, failure, time.monotonic(), self.url))

    async def page(self, reader: Reader) -> AsyncGenerator[SessionResult, None]:
        """One page of the feed for a reader of your own; one that breaks off is gone on with by the next call."""
        attempts = Attempts(self._retry)
        while True:
            try:
                following = await self._read_page(reader)
            except (httpx.TransportError, ApiError) as failure:
                if came := list(reader.finish(None)):
                    for result in came:
                        yield result
                    return
                await asyncio.sleep(verdict(attempts, failure, time.monotonic(), self.url))
            else:
                for result in reader.finish(following):
                    yield result
                return

    async def _read_page(self, reader: Reader) -> str | None:
        response = await self._http.send(request_of(self._http, page_call(reader), self._timeout), stream=True)
        try:
            if not response.is_success:
                await response.aread()
            checked(response)
            async for piece in response.aiter_bytes():
                reader.take(piece)
            return response.headers.get("X-Polar-Next")
        finally:
            await response.aclose()


def _key(key: Callable[[Mapping[str, Any]], str] | None, task: Mapping[str, Any]) -> str | None:
    return key(task) if key is not None else None


async def _draw(submitting: AsyncGenerator[Accepted, None], answered: list[Accepted]) -> None:
    async with aclosing(submitting) as drawn:
        async for accepted in drawn:
            answered.append(accepted)


def _over(aside: asyncio.Task[None]) -> bool:
    """Whether it has ended. Raises what it raised."""
    if not aside.done():
        return False
    aside.result()
    return True
