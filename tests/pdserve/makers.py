"""Children for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.child import ChildSpec

SCRIPT = Path(__file__).with_name("child_script.py")


def make_spec(folder: Path, mode: str = "beat", **changes: Any) -> ChildSpec:
    """A child that runs child_script.py, with short limits."""
    settings: dict[str, Any] = {"start_limit_s": 20.0, "beat_limit_s": 2.0, "drain_s": 5.0} | changes
    return ChildSpec("child", (str(SCRIPT), str(folder), mode), folder / "child.log", **settings)


def pids_in(folder: Path) -> list[int]:
    """The process ids of all children that were started, in order."""
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []
