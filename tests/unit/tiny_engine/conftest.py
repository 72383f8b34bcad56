"""The packaged checkpoint, loaded once for the unit tests of the tiny engine."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from tokenizers import Tokenizer

from polar.tiny_engine import MODEL_DIR
from polar.tiny_engine.engine import load_tokenizer
from polar.tiny_engine.model import Qwen3


@pytest.fixture(scope="session")
def model() -> Qwen3:
    """The packaged weights."""
    return Qwen3.load(MODEL_DIR)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The packaged tokenizer."""
    return load_tokenizer(MODEL_DIR)
