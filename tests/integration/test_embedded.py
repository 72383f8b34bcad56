"""The embedded Postgres and broker and the supervisor, with real servers and real kills."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from polar.embedded import EmbeddedBroker, EmbeddedError, EmbeddedPostgres, Service, Supervisor
from polar.embedded.postgres import DATABASE

pytestmark = pytest.mark.integration

ENV = {"PATH": os.defpath}


def connect(server: EmbeddedPostgres) -> psycopg.Connection[tuple[object, ...]]:
    """Open a client connection by the server's URL."""
    return psycopg.connect(server.url.replace("postgresql+psycopg", "postgresql"), autocommit=True)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, and fail when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Say whether a process runs (a zombie does not)."""
    return os.path.exists(f"/proc/{pid}") and bool(Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stopped Postgres that was started once."""
    home = tmp_path_factory.mktemp("cluster")
    server = EmbeddedPostgres(home / "pg")
    server.start()
    server.stop()
    return home


@pytest.fixture
def postgres(cluster: Path, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A running Postgres in a fresh copy of that folder."""
    shutil.copytree(cluster, tmp_path / "home")
    server = EmbeddedPostgres(tmp_path / "home" / "pg")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A running broker in a fresh folder."""
    server = EmbeddedBroker(tmp_path / 'a "quoted" folder' / "broker")
    server.start()
    yield server
    server.stop()


def test_postgres_is_as_asked(postgres: EmbeddedPostgres) -> None:
    """The role is an ordinary one, the database UTF-8, the server durable, and the password stays private."""
    with connect(postgres) as client:
        row = client.execute("SELECT current_user, rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
        assert row == ("polar", False)
        for name, value in {
            "server_encoding": "UTF8",
            "fsync": "on",
            "synchronous_commit": "on",
            "jit": "off",
            "max_connections": "200",
            "listen_addresses": "127.0.0.1",
        }.items():
            assert client.execute("SELECT current_setting(%s)", [name]).fetchone() == (value,)
        assert client.execute("SELECT upper('ä')").fetchone() == ("Ä",)
    secret = postgres.data_dir.with_name("pg.password")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(postgres.data_dir.stat().st_mode) == 0o700
    assert postgres.password not in postgres.log_path.read_text()
    assert postgres.pid is not None
    assert postgres.password.encode() not in Path(f"/proc/{postgres.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("user", ["polar", "postgres"])
def test_postgres_refuses_strangers(postgres: EmbeddedPostgres, user: str) -> None:
    """Without the password nobody gets in, and the superuser not at all."""
    password = "wrong" if user == "polar" else postgres.password
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(host="127.0.0.1", port=postgres.port, user=user, password=password, dbname=DATABASE)


def test_postgres_keeps_rows_over_restart_and_kill(postgres: EmbeddedPostgres) -> None:
    """Committed rows survive a stop and a kill -9 of the server under write load."""
    with connect(postgres) as client:
        client.execute("CREATE TABLE kept (n int)")
        client.execute("INSERT INTO kept VALUES (1)")
    assert postgres.pid is not None
    old = postgres.pid
    postgres.stop()
    assert postgres.pid is None
    assert not alive(old)
    postgres.start()
    with connect(postgres) as client:
        client.execute("INSERT INTO kept VALUES (2)")
        os.kill(postgres.pid, signal.SIGKILL)
        until(lambda: postgres.pid is None)
        postgres.start()
    with connect(postgres) as client:
        assert client.execute("SELECT array_agg(n ORDER BY n) FROM kept").fetchone() == ([1, 2],)


def test_postgres_ignores_a_stale_pid_of_another_program(postgres: EmbeddedPostgres) -> None:
    """A pid file whose number now belongs to another program of this user does not block the start."""
    postgres.stop()
    pid_file = postgres.data_dir / "postmaster.pid"
    stranger = subprocess.Popen(["sleep", "30"])
    try:
        pid_file.write_text(f"{stranger.pid}\n{postgres.data_dir}\n1\n{postgres.port}\n\n127.0.0.1\n")
        postgres.start()
    finally:
        stranger.kill()
        stranger.wait()


def test_postgres_gets_a_new_password_when_the_file_is_lost(postgres: EmbeddedPostgres) -> None:
    """The data outlive a lost password file."""
    postgres.stop()
    postgres.data_dir.with_name("pg.password").unlink()
    again = EmbeddedPostgres(postgres.data_dir)
    again.start()
    try:
        assert again.password != postgres.password
        with connect(again) as client:
            assert client.execute("SELECT 1").fetchone() == (1,)
    finally:
        again.stop()


def test_postgres_leaves_a_foreign_folder_alone(tmp_path: Path) -> None:
    """A folder with other content is refused untouched."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(EmbeddedError, match="is not empty .*choose another data folder"):
        EmbeddedPostgres(tmp_path).start()
    assert (tmp_path / "notes").read_text() == "mine"


def test_postgres_first_start_can_be_killed(tmp_path: Path) -> None:
    """A first start that is killed in the middle does not spoil the next one."""
    code = "import sys, pathlib, polar.embedded as e; e.EmbeddedPostgres(pathlib.Path(sys.argv[1])).start()"
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pg")])
    until(lambda: any(tmp_path.glob("pg.new-*/base")))
    first.kill()
    first.wait()
    assert not (tmp_path / "pg").exists()
    server = EmbeddedPostgres(tmp_path / "pg")
    server.start()
    try:
        with connect(server) as client:
            assert client.execute("SELECT 1").fetchone() == (1,)
    finally:
        server.stop()


@pytest.mark.parametrize("kind", [EmbeddedPostgres, EmbeddedBroker])
def test_second_server_in_one_folder_is_refused(
    kind: type[EmbeddedPostgres] | type[EmbeddedBroker], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live server in the folder gives an error that says so, and goes on undisturbed."""
    monkeypatch.setattr("polar.embedded.server._HOLDER_GRACE_SECONDS", 0.2)
    first = request.getfixturevalue("postgres" if kind is EmbeddedPostgres else "broker")
    with pytest.raises(EmbeddedError, match="another `polar up` uses this folder; stop it"):
        kind(first.data_dir).start()
    assert first.ready()


def test_broker_keeps_writes_over_restart_and_kill(broker: EmbeddedBroker) -> None:
    """Writes survive a stop, and a kill -9 loses at most the last second."""
    with redis.Redis.from_url(broker.url) as client:
        client.set("stop", "kept")
    broker.stop()
    broker.start()
    with redis.Redis.from_url(broker.url) as client:
        assert client.get("stop") == b"kept"
        client.set("kill", "kept")
    time.sleep(1.1)  # appendfsync everysec
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    until(lambda: broker.pid is None)
    broker.start()
    with redis.Redis.from_url(broker.url) as client:
        assert client.get("kill") == b"kept"


def test_broker_asks_for_its_password(broker: EmbeddedBroker) -> None:
    """Without the password the broker answers nothing, and its files are private."""
    once = Retry(NoBackoff(), 0)
    with (
        redis.Redis(host="127.0.0.1", port=broker.port, retry=once) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    assert stat.S_IMODE(broker.config_path.stat().st_mode) == 0o600


def test_supervisor_restarts_a_killed_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A killed service comes back in about half a second with one line in the log; a final one stays down."""
    caplog.set_level(logging.WARNING, "polar.embedded")
    services = [
        Service("sleeper", ["sleep", "60"], ENV, tmp_path / "sleeper.log"),
        Service("once", ["true"], ENV, tmp_path / "once.log", restart=False),
    ]
    supervisor, stop, up = Supervisor(services), threading.Event(), threading.Event()
    thread = threading.Thread(target=supervisor.run_forever, args=(stop, up.set))
    thread.start()
    try:
        assert up.wait(5)
        until(lambda: set(supervisor.pids()) == {"sleeper"})
        first = supervisor.pids()["sleeper"]
        os.kill(first, signal.SIGKILL)
        until(lambda: supervisor.pids().get("sleeper", first) != first, 3)
        second = supervisor.pids()["sleeper"]
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive()
    assert not alive(second)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("sleeper ended (killed by SIGKILL); starting it again in 0.5 s" in line for line in lines) == 1
    assert sum("once ended (exit status 0); it is not restarted" in line for line in lines) == 1


def test_supervisor_stops_the_others_when_one_fails(tmp_path: Path) -> None:
    """A service that cannot start takes the ones before it down, and the error shows its log."""
    seen: list[int] = []
    good = Service("good", ["sleep", "60"], ENV, tmp_path / "good.log")
    bad = Service(
        "bad",
        ["sh", "-c", "echo no disk; exit 3"],
        ENV,
        tmp_path / "bad.log",
        ready=lambda: False,
        before=lambda: seen.append(supervisor.pids()["good"]),
    )
    supervisor = Supervisor([good, bad])
    with pytest.raises(EmbeddedError, match=r"bad ended while starting \(exit status 3\)(.|\n)*no disk"):
        supervisor.start()
    assert supervisor.pids() == {}
    assert not alive(seen[0])


SUPERVISE = """
import logging, sys
from pathlib import Path
from polar.embedded import EmbeddedBroker, EmbeddedPostgres, Service, Supervisor
logging.basicConfig(stream=sys.stderr)
home = Path(sys.argv[1])
sleeper = ["sh", "-c", sys.argv[2]]
supervisor = Supervisor([
    EmbeddedPostgres(home / "pg").service(),
    EmbeddedBroker(home / "broker").service(),
    Service("sleeper", sleeper, {"PATH": "/usr/bin:/bin"}, home / "sleeper.log", grace_seconds=30),
])
supervisor.run_forever(on_ready=lambda: print(*supervisor.pids().values(), flush=True))
"""
PLAIN = "exec sleep 60"
STUBBORN = "trap '' TERM; sleep 60"


@pytest.fixture
def supervise(cluster: Path, tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], list[int]]]]:
    """Start a supervisor with Postgres, a broker and a shell in a process of its own; return it and its children."""
    shutil.copytree(cluster, tmp_path / "home")
    started: list[subprocess.Popen[str]] = []

    def start(shell: str) -> tuple[subprocess.Popen[str], list[int]]:
        argv = [sys.executable, "-c", SUPERVISE, str(tmp_path / "home"), shell]
        proc = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(proc)
        assert proc.stdout is not None
        pids = [int(word) for word in proc.stdout.readline().split()]
        assert len(pids) == 3
        return proc, pids + [pid for parent in pids for pid in children(parent)]

    yield start
    for proc in started:
        proc.kill()
        proc.communicate()


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_nothing_outlives_a_terminated_supervisor(
    supervise: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    """SIGTERM stops every service, Postgres's own children included, and the supervisor ends well."""
    proc, pids = supervise(PLAIN)
    assert len(pids) > 5
    proc.terminate()
    assert proc.wait(10) == 0
    assert [pid for pid in pids if alive(pid)] == []


def test_nothing_outlives_a_killed_supervisor(
    supervise: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    """SIGKILL of the supervisor takes every service along, and the next start works at once in the same folder."""
    proc, pids = supervise(PLAIN)
    proc.kill()
    proc.wait()
    _, again = supervise(PLAIN)
    until(lambda: not any(alive(pid) for pid in pids), 5)
    assert all(alive(pid) for pid in again[:3])


def test_second_interrupt_kills(supervise: Callable[..., tuple[subprocess.Popen[str], list[int]]]) -> None:
    """A second Ctrl-C does not wait for a service that will not stop."""
    proc, pids = supervise(STUBBORN)
    until(lambda: bool(children(pids[2])))  # its trap stands once it has gone to sleep
    proc.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        proc.wait(0.7)
    proc.send_signal(signal.SIGINT)
    assert proc.wait(5) == 0
    until(lambda: not any(alive(pid) for pid in pids), 2)


def test_supervisor_brings_killed_servers_back(
    supervise: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    """Killed servers are started again under the same supervisor."""
    proc, pids = supervise(PLAIN)
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)

    def names() -> list[str]:
        return sorted(Path(f"/proc/{pid}/comm").read_text().strip() for pid in children(proc.pid) if alive(pid))

    until(lambda: not any(alive(pid) for pid in pids[:2]))
    until(lambda: names() == ["postgres", "sleep", "valkey-server"])
