from __future__ import annotations

from pathlib import Path

import pytest

from router.served_model import ServedModel
from tests.router.makers import load_model


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    """The text side of the bundled model, with room for 128 tokens."""
    return load_model(model_folder)
