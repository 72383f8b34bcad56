"""The synchronous client. Safe to use from several threads."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
from polar.client.transport import checked, options, page_call, read, request_of, table_call, verdict
from polar.client.types import Accepted, Json, Policy, SessionResult, SessionState, TaskStatus, Trajectory

T = TypeVar("T")
RUN_WAIT_SECONDS = 5.0
"""That a run waits for a result before it looks whether a submit failed."""
Sleep = Callable[[float], object]


class Client:
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
        self._http = httpx.Client(**options(self.url, key, timeout))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def submit(self, task: Mapping[str, Any], *, idempotency_key: str | None = None) -> Accepted:
        """Submit one task. A key of your own makes a submit safe to repeat after a restart, too."""
        return self._do(calls.submit(task, idempotency_key))

    def submit_many(
        self,
        tasks: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        idempotency_key: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> Iterator[Accepted]:
        """Submit tasks, so many at a time; the answers in the order of the tasks, which are drawn as there is room."""
        with ThreadPoolExecutor(concurrency, thread_name_prefix="polar-submit") as pool:
            waiting: deque[Future[Accepted]] = deque()
            stop = threading.Event()
            try:
                for task in tasks:
                    if len(waiting) >= concurrency:
                        yield waiting.popleft().result()
                    call = calls.submit(task, idempotency_key and idempotency_key(task))
                    waiting.append(pool.submit(self._do, call, _until(stop)))
                while waiting:
                    yield waiting.popleft().result()
            finally:
                stop.set()

    def status(self, task_id: str, *, wait: float = 0.0, full: bool = True) -> TaskStatus:
        """How a task is doing; with `wait`, once it has ended or so many seconds are over (60 at most)."""
        return self._do(calls.status(task_id, wait, full))

    def wait(self, task_id: str, *, seconds: float | None = None, full: bool = True) -> TaskStatus:
        """The task once it has ended. Raises TimeoutError."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = WAIT_SECONDS if end is None else end - time.monotonic()
            found = self.status(task_id, wait=max(0.0, min(WAIT_SECONDS, left)), full=False)
            if found.ended:
                return self.status(task_id) if full else found
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{task_id} has not ended after {seconds:g} s; it goes on")

    def cancel(self, task_id: str) -> TaskStatus:
        """Cancel what has not ended of a task; repeating it changes nothing."""
        return self._do(calls.cancel(task_id))

    def tasks(
        self, *, status: str | None = None, harness: str | None = None, since: float | None = None, limit: int = 200
    ) -> list[Json]:
        """Tasks in a line each, newest first."""
        return self._do(calls.tasks(status, harness, since, limit))

    def results(
        self,
        *,
        after: str | None = None,
        consumer: str | None = None,
        group: str | None = None,
        task_id: str | None = None,
        full: bool = True,
        limit: int = PAGE,
        follow: bool = False,
    ) -> Iterator[SessionResult]:
        """Results of the feed in its order, from `after` or the consumer's place on; with `follow`, without end.

        Lost connections are gone on from. A `consumer` is moved by `ack` alone."""
        reader = Reader(after, consumer, group, task_id, full, limit, WAIT_SECONDS if follow else 0.0)
        came = True
        while came or follow:
            came = False
            for result in self.page(reader):
                came = True
                yield result

    def batches(self, *, after: str | None = None, limit: int = PAGE, **filters: Any) -> Iterator[tuple[str, Any]]:
        """Pages of the feed as (cursor after it, pyarrow.Table): one row a trace, for many tokens the quickest way."""
        import pyarrow

        reader = Reader(after, limit=limit, **filters)
        while True:
            response = self._send(table_call(reader))
            table = pyarrow.ipc.open_stream(response.content).read_all()
            reader.after = response.headers["X-Polar-Next"]
            if not table.num_rows:
                return
            yield reader.after, table

    def ack(self, consumer: str, cursor: str, *, rewind: bool = False) -> str:
        """Move a consumer to a result's cursor: everything up to it is safe. Where it then is."""
        return self._do(calls.ack(consumer, cursor, rewind))

    def feed_end(self) -> str:
        """The cursor of a reader who wants only what ends from now on."""
        return self._do(calls.feed_end())

    def run(
        self,
        tasks: Iterable[Mapping[str, Any]] | Mapping[str, Any],
        *,
        progress: bool = False,
        concurrency: int = 8,
        group: str | None = None,
        full: bool = True,
        idempotency_key: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> Iterator[SessionResult]:
        """Submit tasks and yield each session's result as it ends, until all have. Left early, the tasks go on.

        Results of other clients' tasks are read and passed by; with `group`, the `metadata.group_id` of all these
        tasks, the server leaves them out."""
        reader = Reader(self.feed_end(), group=group, full=full, wait=RUN_WAIT_SECONDS)
        given = [tasks] if isinstance(tasks, Mapping) else tasks
        with Progress(progress) as bar:
            tracker = Tracker(bar)
            expected = (tracker.expect(task) for task in given)
            submitting = self.submit_many(expected, concurrency=concurrency, idempotency_key=idempotency_key)
            with _Aside(submitting) as aside:
                while not tracker.done:
                    # Whether all was submitted is asked before the page is read: what ended by then is on it.
                    tracker.all_submitted, answered = aside.look()
                    for accepted in answered:
                        # Had been submitted before, so its first results may lie before this run's beginning.
                        before = self.status(accepted.task_id, full=full).results if accepted.duplicate else []
                        yield from filter(tracker.take, before)
                    if not tracker.done:
                        yield from filter(tracker.take, self.page(reader))

    def session(self, session_id: str) -> SessionState:
        """Where a session is and how it is doing there."""
        return self._do(calls.session(session_id))

    def sessions(self, task_id: str) -> Iterator[SessionState]:
        """A task's sessions as they are now, read a page at a time."""
        after: int | None = -1
        while after is not None:
            rows, after = self._do(calls.sessions(task_id, after, 500))
            yield from rows

    def cancel_session(self, session_id: str) -> SessionState:
        """Cancel one session; repeating it changes nothing."""
        return self._do(calls.cancel_session(session_id))

    def trajectory(self, session_id: str) -> Trajectory:
        """A session's trajectory with its token arrays."""
        return self._do(calls.trajectory(session_id))

    def completions(self, session_id: str) -> Iterator[Json]:
        """A session's captured model calls in order, read a page at a time."""
        after: int | None = 0
        while after is not None:
            rows, after = self._do(calls.completions(session_id, after, 50))
            yield from rows

    def events(self, session_id: str) -> list[Json]:
        """Every move of a session."""
        return self._do(calls.events(session_id))

    def policy(self) -> Policy:
        """The policy's version and the gate."""
        return self._do(calls.policy())

    def set_policy(
        self, version: int | str | None = UNSET, *, name: str = UNSET, max_staleness: int | None = UNSET
    ) -> Policy:
        """Change what is given; `max_staleness=None` takes the bound away."""
        return self._do(calls.set_policy(version, name, max_staleness))

    def push(
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
        return self._do(calls.push(version, path, mode, lanes, probe, wait))

    def pause(self, mode: str = "drain", *, wait: float = 300.0) -> Policy:
        """Hold generation everywhere; returns once nothing is sampled. Raises NotHoldingError, the gate then closed."""
        return self._do(calls.pause(mode, wait))

    def resume(self, *, wait: float = 10.0) -> Policy:
        """Let generation go on everywhere."""
        return self._do(calls.resume(wait))

    def ready(self) -> bool:
        """Whether Polar is up, its database answers and a lane is alive."""
        try:
            self._do(calls.ready())
        except (UnreachableError, ServerError):
            return False
        return True

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        wait: float = 0.0,
    ) -> Any:
        """Any other path of the API; the answer's JSON. Sent again like every call: use it for what bears that."""
        return self._do(Call(method, path, same, params or {}, body, wait=wait))

    def _do(self, call: Call[T], sleep: Sleep = time.sleep) -> T:
        return read(call, self._send(call, sleep))

    def _send(self, call: Call[Any], sleep: Sleep = time.sleep) -> httpx.Response:
        """The answer, once there is one."""
        attempts = Attempts(self._retry if call.patient else NO_RETRY)
        while True:
            try:
                return checked(self._http.send(request_of(self._http, call, self._timeout)))
            except (httpx.TransportError, ApiError) as failure:
                sleep(verdict(attempts, failure, time.monotonic(), self.url))

    def page(self, reader: Reader) -> Iterator[SessionResult]:
        """One page of the feed for a reader of your own; one that breaks off is gone on with by the next call."""
        attempts = Attempts(self._retry)
        while True:
            try:
                following = self._read_page(reader)
            except (httpx.TransportError, ApiError) as failure:
                if came := list(reader.finish(None)):
                    yield from came
                    return
                time.sleep(verdict(attempts, failure, time.monotonic(), self.url))
            else:
                yield from reader.finish(following)
                return

    def _read_page(self, reader: Reader) -> str | None:
        response = self._http.send(request_of(self._http, page_call(reader), self._timeout), stream=True)
        try:
            if not response.is_success:
                response.read()
            checked(response)
            for piece in response.iter_bytes():
                reader.take(piece)
            return response.headers.get("X-Polar-Next")
        finally:
            response.close()


class _Stopped(Exception):
    """The run was left; nobody waits for this submit."""


def _until(stop: threading.Event) -> Sleep:
    """A sleep that ends, and ends its thread's work, when the run is left."""

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise _Stopped

    return sleep


class _Aside:
    """Draws answers of submits in a thread of its own, while results are read."""

    def __init__(self, submitting: Iterator[Accepted]) -> None:
        self._submitting = submitting
        self._answered: queue.SimpleQueue[Accepted] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="polar-run", daemon=True)

    def __enter__(self) -> _Aside:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> tuple[bool, list[Accepted]]:
        """Whether all was submitted, and the answers since the last look. Raises what a submit raised."""
        over = not self._thread.is_alive()
        if over and self._error is not None:
            raise self._error
        answered = []
        with suppress(queue.Empty):
            while True:
                answered.append(self._answered.get_nowait())
        return over, answered

    def _draw(self) -> None:
        try:
            for accepted in self._submitting:
                self._answered.put(accepted)
                if self._stop.is_set():
                    break
        except BaseException as error:  # noqa: BLE001 - handed to the thread that reads results
            self._error = error
        finally:
            self._submitting.close()  # type: ignore[attr-defined]
