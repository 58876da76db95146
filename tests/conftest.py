"""What all tests share: the bundled model, and no look-up that leaves the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.models import resolve_model

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each closed connection is told on stderr


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M-Instruct in bfloat16: a real model, fetched and converted once a machine."""
    return resolve_model("bundled")
