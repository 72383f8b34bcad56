"""Fixtures of all belts: one Postgres and one broker for the whole run, a fresh database for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import migrations
from polar.db import connect
from polar.embedded import EmbeddedBroker, EmbeddedPostgres
from polar.runtimes.docker_daemon import client as runtimes_docker_client
from tests.fakes import docker_daemon


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Postgres of this test process; the URL of its database."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres") / "data")
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def template_database(postgres: str) -> str:
    """A migrated database that tests copy: quicker than migrating for each."""
    return _create(postgres, "polar_template", migrate=True)


def _create(postgres: str, name: str, *, template: str = "template1", migrate: bool = False) -> str:
    server = connect(postgres, pool_size=1)
    with server.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
    server.dispose()
    url = postgres.rpartition("/")[0] + f"/{name}"
    if migrate:
        migrations.upgrade(url)
    return url


@pytest.fixture
def database_url(postgres: str, template_database: str) -> str:
    """An empty, migrated database of this test alone."""
    return _create(postgres, f"test_{uuid.uuid4().hex[:12]}", template=template_database.rpartition("/")[2])


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
