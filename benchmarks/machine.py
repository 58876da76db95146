"""The machine that is measured on, and what else it does meanwhile. For Linux; elsewhere little is known."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.round import CpuTime

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    num_cores: int
    flags: tuple[str, ...]  # those that matter to matrix products
    memory_gb: float
    system: str

    def __str__(self) -> str:
        flags = " ".join(self.flags) or "no vector flags known"
        amx = "" if any(flag.startswith("amx") for flag in self.flags) else " (no amx)"
        return f"{self.cpu}, {self.num_cores} cores, {flags}{amx}, {self.memory_gb:.0f} GB, {self.system}"


def this_machine() -> Machine:
    info = _first_values(Path("/proc/cpuinfo"))
    flags = info.get("flags", "").split()
    memory_kib = _first_values(Path("/proc/meminfo")).get("MemTotal", "0 kB").split()[0]
    return Machine(
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        memory_gb=int(memory_kib) * 1024 / 1e9,
        system=f"{platform.system()} {platform.release()}",
    )


class CpuClock:
    """CPU time from its making to `read`, by who used it. `server_pids` are the server's processes."""

    def __init__(self, server_pids: Iterable[int] = ()) -> None:
        self._server_pids = tuple(server_pids)
        self._client_s = time.process_time()
        self._server_s = sum(map(_cpu_s, self._server_pids))
        self._machine = _machine_s()

    def read(self) -> CpuTime:
        client_s = time.process_time() - self._client_s
        server_s = sum(map(_cpu_s, self._server_pids)) - self._server_s if self._server_pids else None
        now = _machine_s()
        if now is None or self._machine is None:
            return CpuTime(client_s, server_s)
        busy_s, steal_s = (later - earlier for earlier, later in zip(self._machine, now, strict=True))
        others_s = max(0.0, busy_s - client_s - server_s) if server_s is not None else None
        return CpuTime(client_s, server_s, others_s, steal_s)


def busy_cores(over_s: float) -> float | None:
    """How many cores were busy, or taken by the host, in the next `over_s` seconds. Blocks for them."""
    before = _machine_s()
    time.sleep(over_s)
    after = _machine_s()
    return (sum(after) - sum(before)) / over_s if before and after else None


def memory_gb(pids: Iterable[int]) -> float | None:
    """Proportional set size of these processes: what is shared counts once in their sum. None where not known."""
    total = 0
    for pid in pids:
        try:
            total += int(_first_values(Path(f"/proc/{pid}/smaps_rollup"))["Pss"].split()[0])
        except (OSError, KeyError):
            continue  # it has ended
    return total * 1024 / 1e9 or None


def _first_values(path: Path) -> dict[str, str]:
    """`key: value` lines; of a key that comes again, the first. Empty where there is no such file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    return values


def _cpu_s(pid: int) -> float:
    """User and system time of a process, with all its threads; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _machine_s() -> tuple[float, float] | None:
    """Busy and stolen CPU seconds since boot."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(ticks) * _TICK_S for ticks in first[1:9])
    return user + nice + system + irq + softirq, steal
