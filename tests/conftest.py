"""Fixtures of all belts: one Postgres and one broker for the whole run, a fresh database for each test."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import Engine, text

import migrations
from polar import tracing
from polar.db import connect
from polar.embedded import EmbeddedBroker, EmbeddedPostgres
from polar.runtimes.docker_daemon import client as runtimes_docker_client
from tests.fakes import docker_daemon


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Postgres of this test process; the URL of its database."""
    data = tmp_path_factory.mktemp("postgres") / "data"
    server = EmbeddedPostgres(data)
    server.start()
    yield server.url
    server.stop()
    shutil.rmtree(data)


@pytest.fixture(scope="session")
def template_database(postgres: str) -> str:
    """A migrated database that tests copy: quicker than migrating for each."""
    return _create(postgres, "polar_template", migrate=True)


def _on_server(postgres: str, *statements: str) -> None:
    server = connect(postgres, pool_size=1)
    with server.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.execute(text(statement))
    server.dispose()


def _create(postgres: str, name: str, *, template: str = "template1", migrate: bool = False) -> str:
    _on_server(postgres, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    url = postgres.rpartition("/")[0] + f"/{name}"
    if migrate:
        migrations.upgrade(url)
    return url


@pytest.fixture
def database_url(postgres: str, template_database: str) -> Iterator[str]:
    """An empty, migrated database of this test alone; dropped after it, or a thousand tests would fill a disk."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield _create(postgres, name, template=template_database.rpartition("/")[2])
    # FORCE would take the right to end Postgres's own autovacuum, too.
    ours = f"FROM pg_stat_activity WHERE datname = '{name}' AND usename = current_user"
    _on_server(postgres, f"SELECT pg_terminate_backend(pid, 5000) {ours}", f'DROP DATABASE "{name}"')


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    """The same, connected."""
    engine = connect(database_url, pool_size=4)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis-compatible broker of this test process."""
    server = EmbeddedBroker(tmp_path_factory.mktemp("broker") / "data")
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def docker_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Docker daemon of this test process, with an image made of this machine's packages."""
    why = docker_daemon.missing()
    if why is not None:
        pytest.skip(why)
    with docker_daemon.running(tmp_path_factory.mktemp("docker")) as host, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", host)
        runtimes_docker_client.cache_clear()
        yield host
        runtimes_docker_client().close()
        runtimes_docker_client.cache_clear()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return Path(__file__).parent.parent


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Tracing, on, into memory."""
    exporter = InMemorySpanExporter()
    tracing.begin(SimpleSpanProcessor(exporter), "test")
    yield exporter
    tracing.end()
