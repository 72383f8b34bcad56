"""What a runtime claims by its class attributes, asked for real: network, limits, copies of a prepared state."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polar import runtimes
from polar.errors import RuntimeFault, SpecError
from polar.runtimes import RUNTIMES, Limits, Runtime
from polar.spec import RuntimeSpec
from tests.fakes import hello
from tests.fakes.runtimes import HERE, spec_of

FETCH = "python -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "


@pytest.fixture
def address() -> Iterator[str]:
    """A server of the node, as the proxy is one."""
    with hello.serve() as (host, port):
        yield f"http://{host}:{port}"


class Makers:
    """Starts runtimes and removes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Runtime] = []

    def __call__(self, spec: RuntimeSpec, *, store: Path | None = None) -> Runtime:
        runtime = runtimes.create(spec, f"session-{len(self.made)}", self.folder / f"workspace-{len(self.made)}")
        self.made.append(runtime)
        if store is None:
            runtime.start(Limits(60))
        else:
            runtime.start_from(store, Limits(60))
        return runtime


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Makers]:
    """A maker of runtimes."""
    makers = Makers(tmp_path)
    yield makers
    for runtime in makers.made:
        runtime.destroy()


def able(backend: str, request: pytest.FixtureRequest, **asked: Any) -> RuntimeSpec:
    """A spec that needs the ability."""
    spec = spec_of(backend, request, **asked)
    runtimes.check(spec)
    return spec


def claiming(ability: str) -> list[str]:
    """The runtimes of this machine that claim it."""
    return [name for name in HERE if getattr(runtimes.runtime_class(RuntimeSpec(backend=name)), ability)]


ASKED = {
    "ISOLATES_NETWORK": {"network": "none"},
    "LIMITS_RESOURCES": {"memory_mb": 64, "cpus": 1},
    "LIMITS_PIDS": {"pids": 50},
    "LIMITS_STORAGE": {"storage_mb": 100},
    "HAS_GPUS": {"gpus": 1},
    "COPIES_PREPARED": {"prepare_once": True},
}


@pytest.mark.parametrize("ability", ASKED)
@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_an_ability_that_is_not_claimed_is_refused_at_submit(name: str, ability: str) -> None:
    """And one that is claimed is taken; the error names the field."""
    kind = runtimes.runtime_class(RuntimeSpec(backend=name))
    spec = RuntimeSpec(backend=name, image="x" if kind.NEEDS_IMAGE else None, **ASKED[ability])
    if getattr(kind, ability):
        runtimes.check(spec)
        return
    with pytest.raises(SpecError) as refused:
        runtimes.check(spec)
    assert {field for field, _ in refused.value.errors} == {f"runtime.{field}" for field in ASKED[ability]}


@pytest.mark.parametrize("asked", [{"network": "none"}, {"allow_internet": False}], ids=["none", "no-internet"])
@pytest.mark.parametrize("backend", claiming("ISOLATES_NETWORK"))
def test_without_network_the_proxy_and_only_the_proxy_is_reached(
    backend: str, asked: dict[str, Any], address: str, make: Makers, request: pytest.FixtureRequest
) -> None:
    """The address that reach gives works, at the same time from two commands; all others do not."""
    runtime = make(able(backend, request, **asked))
    with socket.create_server(("127.0.0.1", 0)) as other:
        before = runtime.exec(f"{FETCH} {address}/", limits=Limits(30))
        inside = runtime.reach(f"{address}/s/key")
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda _: runtime.exec(f"{FETCH} {inside}/v1", limits=Limits(30)).stdout, range(2)))
        refused = runtime.exec(f"{FETCH} http://127.0.0.1:{other.getsockname()[1]}/", limits=Limits(30))
        ways = runtime.exec("cut -f 1 /proc/net/route; ls /sys/class/net 2>/dev/null", limits=Limits(30)).stdout.split()
    assert not before.ok
    assert results == ["/s/key/v1\n"] * 2
    assert "refused" in refused.stderr
    assert set(ways) <= {"Iface", "lo", "tunl0", "sit0", "ip6tnl0", "bonding_masters"}


@pytest.mark.parametrize("backend", HERE)
def test_with_the_nodes_network_the_proxy_is_where_it_is(
    backend: str, address: str, make: Makers, request: pytest.FixtureRequest
) -> None:
    """`host` is the default, and needs no detour."""
    runtime = make(spec_of(backend, request))
    assert runtime.reach(address) == address
    assert runtime.exec(f"{FETCH} {address}/x", limits=Limits(30)).stdout == "/x\n"


@pytest.mark.parametrize("backend", claiming("LIMITS_PIDS"))
def test_a_fork_bomb_ends_at_the_limit_and_can_be_ended(
    backend: str, make: Makers, request: pytest.FixtureRequest
) -> None:
    """More processes than allowed are refused; a time-out ends them all even when none can be started any more."""
    runtime = make(able(backend, request, pids=40))
    counted = runtime.exec(
        "for i in $(seq 100); do sleep 5 & done 2>/dev/null; ls /proc | grep -c '^[0-9]'", limits=Limits(4)
    )
    assert counted.timed_out or not counted.ok or int(counted.stdout.strip() or 0) <= 42
    runtime.kill_all()
    bomb = runtime.exec("while :; do sleep 60 2>/dev/null & done", limits=Limits(1.5))
    assert bomb.timed_out
    runtime.kill_all()
    assert runtime.exec("echo well", limits=Limits(20)).stdout == "well\n"


@pytest.mark.parametrize("backend", claiming("LIMITS_STORAGE"))
def test_storage_is_limited_or_refused_with_the_reason(
    backend: str, make: Makers, request: pytest.FixtureRequest
) -> None:
    """Where the node's file system cannot limit storage, the start fails and says so."""
    spec = able(backend, request, storage_mb=64)
    try:
        runtime = make(spec)
    except RuntimeFault as refused:
        assert "storage" in refused.message
        assert not refused.retryable
        return
    assert not runtime.exec("head -c 200000000 /dev/zero >big", limits=Limits(60)).ok


@pytest.mark.parametrize("backend", claiming("COPIES_PREPARED"))
def test_copies_of_a_prepared_state_do_not_see_each_other(
    backend: str, make: Makers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each starts with what was prepared, files, modes and links; what one does to it no other sees, nor the store."""
    spec = able(backend, request, prepare_once=True)
    first = make(spec)
    script = "mkdir -p deep; echo prepared >deep/file; chmod 750 deep/file; ln -s deep/file link; echo home >$HOME/seen"
    assert first.exec(script, limits=Limits(30)).ok
    store = tmp_path / f"store{abs(hash(request.node.nodeid))}"
    store.mkdir()
    first.kill_all()
    first.freeze(store)
    first.exec("echo later >deep/file", limits=Limits(30))
    first.destroy()
    looked = "cat deep/file link $HOME/seen; stat -c %a deep/file; ls"
    try:
        one, two = make(spec, store=store), make(spec, store=store)
        expected = "prepared\nprepared\nhome\n750\ndeep\nlink\n"
        assert one.exec(looked, limits=Limits(30)).stdout == expected
        assert one.exec("echo mine >deep/file; echo x >>link; touch new; rm $HOME/seen", limits=Limits(30)).ok
        assert two.exec(looked, limits=Limits(30)).stdout == expected
        one.destroy()
        assert make(spec, store=store).exec(looked, limits=Limits(30)).stdout == expected
    finally:
        runtimes.runtime_class(spec).forget(store)
