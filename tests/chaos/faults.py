"""The faults: which process gets which signal, and how far the sessions are by then."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import redis

from polar.runtimes import tree
from tests.chaos import arrangements
from tests.chaos.scene import Scene, environ, program, until, variables, words
from tests.fakes.garbage import KINDS, Garbage, garbage

Act = Callable[[Scene, list[str]], None]
SOON = 30.0
HELD_SECONDS = 5.0
ENDING = ("no ids", "another prompt")
"""Nonsense that ends a session, for the lane is set up wrong and must not be trained on: it says so at once."""


def nothing(scene: Scene, names: list[str]) -> None:
    """The signal was all."""


@dataclass(frozen=True)
class Fault:
    """One line of the table."""

    name: str
    when: str
    """The stage in which sessions are running when it strikes; `submit`: between two submits."""
    act: Act = nothing
    quick: bool = False
    """Part of the short form."""
    target: str = ""
    """The service that is hit: looked for beforehand, since a stage may be over in milliseconds."""
    ends_agents: int = 0
    """Agents that it ends for good: their sessions end with what they have."""
    backend: str = "local"
    """The runtime that the sessions live in."""
    arrangement: str = ""
    """What has to be arranged beforehand, by its name in `arrangements`."""
    unnoticed: bool = False
    """Nothing may be tried again because of it."""

    @property
    def id(self) -> str:
        return f"{self.name} in {self.when}".replace(" ", "-")

    def strike(self, scene: Scene, names: list[str]) -> None:
        """Wait for the moment, then act."""
        pid = until(lambda: scene.pid(self.target), SOON, lambda: f"no {self.target} runs") if self.target else 0
        if self.when != "submit":
            running = lambda: scene.count(names, self.when, "running") >= 1  # noqa: E731
            until(running, SOON, lambda: f"nobody is running in {self.when}", pause=0.002)
            if self.when == "execute":
                time.sleep(0.7)  # into the first calls, and past the start of the agents
        if pid:
            os.kill(pid, signal.SIGKILL)
        self.act(scene, names)


def kill(scene: Scene, name: str) -> None:
    """SIGKILL the service's first process."""
    os.kill(until(lambda: scene.pid(name), SOON, lambda: f"no {name} runs"), signal.SIGKILL)


def kill_inner(scene: Scene, names: list[str]) -> None:
    """SIGKILL the process that serves, and leave its master."""
    master = scene.pid("proxy")
    (inner,) = [pid for pid, found in tree.processes().items() if found.parent == master]
    os.kill(inner, signal.SIGKILL)


def empty_broker(scene: Scene, names: list[str]) -> None:
    """Make the broker forget everything, and keep it running."""
    redis.Redis.from_url(environ(scene.pid("worker"))["POLAR_BROKER_URL"]).flushall()


def empty_and_kill_broker(scene: Scene, names: list[str]) -> None:
    """Make the broker forget everything, then kill it."""
    empty_broker(scene, names)
    kill(scene, "valkey-server")


def an_agent(scene: Scene) -> int:
    """One that is at work."""
    return until(scene.agents, SOON, lambda: "no agent runs")[0]


def kill_agent(scene: Scene, names: list[str]) -> None:
    """SIGKILL one agent."""
    os.kill(an_agent(scene), signal.SIGKILL)


def kill_tree(scene: Scene, names: list[str]) -> None:
    """SIGKILL every process of one session at once."""
    session = variables(an_agent(scene))["SESSION_ID"]
    for pid in [pid for pid in tree.processes() if variables(pid).get("SESSION_ID") == session]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_init(scene: Scene, names: list[str]) -> None:
    """SIGKILL the first process inside one agent's sandbox, with which the kernel ends all the others there."""
    found, pid = tree.processes(), an_agent(scene)
    while program(pid) != "bwrap":
        pid = found[pid].parent
    os.kill(pid, signal.SIGKILL)


def hang_engine(scene: Scene, names: list[str]) -> None:
    """SIGSTOP the engine, which then takes connections and says nothing, and let it go on."""
    pid = scene.pid("engine")
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(HELD_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def listening(port: int) -> Iterator[Garbage]:
    """The engine of nonsense on a port that may be taken for a moment yet."""
    end = time.monotonic() + SOON
    while True:
        try:
            with garbage(port, kinds=tuple(kind for kind in KINDS if kind not in ENDING)) as made:
                yield made
                return
        except OSError:
            assert time.monotonic() < end, f"port {port} is not free"
            time.sleep(0.01)


def garble_engine(scene: Scene, names: list[str]) -> None:
    """Put one in its place that answers nonsense, of each kind once or more, and then let it come back."""
    said = words(scene.pid("engine"))
    os.kill(scene.pid("engine"), signal.SIGKILL)
    port = int(said[said.index("--port") + 1])
    with listening(port) as made:
        until(lambda: len(made.told) >= 2 * len(KINDS), SOON, lambda: f"only {made.told}")


def fill_disk(scene: Scene, names: list[str]) -> None:
    """Leave no byte on the disk of Postgres, and make room again after a while."""
    with arrangements.full_disk(scene):
        time.sleep(HELD_SECONDS)


def fill_disk_to_death(scene: Scene, names: list[str]) -> None:
    """The same, until Postgres cannot even log and gives up."""
    pid = scene.pid("postgres")
    with arrangements.full_disk(scene):
        until(lambda: arrangements.write_log(scene) or scene.pid("postgres") != pid, SOON, lambda: "Postgres lives on")
        time.sleep(HELD_SECONDS)


def set_clock(scene: Scene, names: list[str]) -> None:
    """An hour ahead, then two back, for every process of Polar; the database's own stays."""
    for offset in ("+3600", "-3600"):
        arrangements.set_clock(scene, offset)
        time.sleep(2.0)


def kill_up(scene: Scene, names: list[str]) -> None:
    """SIGKILL `polar up` itself, and start it again as a service manager would."""
    scene.process.kill()
    scene.process.wait()
    scene.start()


def kill_all(scene: Scene, names: list[str]) -> None:
    """SIGKILL everything but the servers, all at once."""
    for name in ("api", "proxy", "worker", "beat", "engine"):
        kill(scene, name)


def freeze_worker(scene: Scene, names: list[str]) -> None:
    """SIGSTOP the worker until another one has taken its sessions, then let it come back."""
    pid = scene.pid("worker")
    argv = [f"other@{word.rpartition('@')[2]}" if "@%h" in word else word for word in words(pid)]
    with (scene.home / "logs" / "other.log").open("ab") as log:
        other = subprocess.Popen(argv, env=environ(pid), stdout=log, stderr=log)
    try:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: scene.moves(names, "retry"), SOON, lambda: "no lease ran out")
        time.sleep(1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not scene.open(names), 90, scene.log)
    other.terminate()
    other.wait(20)


FAULTS = [
    Fault("broker", "prewarm", target="valkey-server"),
    Fault("broker emptied", "execute", empty_broker),
    Fault("broker emptied and killed", "execute", empty_and_kill_broker),
    Fault("Postgres", "prewarm", target="postgres"),
    Fault("Postgres", "execute", target="postgres"),
    Fault("engine", "execute", target="engine"),
    Fault("engine hangs for 5 s", "execute", hang_engine),
    Fault("engine answers nonsense", "execute", garble_engine),
    Fault("one agent", "execute", kill_agent, ends_agents=1),
    Fault("one agent's whole tree", "execute", kill_tree, ends_agents=1),
    Fault("one sandbox's init", "execute", kill_init, ends_agents=1, backend="bubblewrap"),
    Fault("API, proxy, worker, beat and engine", "execute", kill_all),
    Fault("`polar up`", "execute", kill_up),
    Fault("API", "submit", target="api"),
    Fault("API", "execute", target="api"),
    Fault("proxy", "execute", target="proxy", quick=True),
    Fault("proxy's inner process", "execute", kill_inner),
    Fault("worker", "prewarm", target="worker"),
    Fault("worker", "execute", target="worker", quick=True),
    Fault("worker", "reconstruct", target="worker"),
    Fault("worker", "evaluate", target="worker"),
    Fault("worker stopped, then back", "execute", freeze_worker),
    Fault("beat", "execute", target="beat"),
    Fault("clock set 1 h ahead, then 2 h back", "execute", set_clock, arrangement="own clock", unnoticed=True),
    Fault("disk of Postgres full for 5 s", "execute", fill_disk, arrangement="small disk"),
    Fault("disk full until Postgres dies", "execute", fill_disk_to_death, arrangement="small disk"),
]
