"""What is said of the machine and of who used it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.machine import CpuClock, busy_cores, memory_gb, this_machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BURN = """
import sys, time
while time.process_time() < 0.3: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_the_machine_is_told_in_one_line() -> None:
    machine = this_machine()
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.memory_gb > 0.1
    assert "\n" not in str(machine)


def test_cpu_time_is_told_by_who_used_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        clock = CpuClock([child.pid])
        child.stdout.readline()
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        used = clock.read()
        assert child.stdin is not None
        child.stdin.close()
    assert used.server_s is not None and used.server_s >= 0.15
    assert 0.05 <= used.client_s < used.server_s + 5
    assert used.others_s is not None and used.others_s >= 0


def test_without_the_server_nothing_is_said_of_others() -> None:
    used = CpuClock().read()
    assert used.server_s is used.others_s is None


def test_busy_cores_are_not_more_than_there_are() -> None:
    busy = busy_cores(0.2)
    assert busy is not None and 0 <= busy <= (os.cpu_count() or 1) + 1


def test_memory_is_summed_over_processes_and_one_that_ended_has_none() -> None:
    one = memory_gb([os.getpid()])
    assert one is not None and one > 0.005
    assert memory_gb([2**22 + 1]) is None
