"""The one table of deadlines. Every wait between two processes ends by one of these.

All in seconds. `kvtransfer` and the services are given the table; none has a number of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    connect_s: float = 1.0  # a TCP or gRPC connection
    open_s: float = 2.0  # OPEN to ACCEPT or REFUSE
    peer_timeout_s: float = 5.0  # silence: no byte, no WORKING, no beat
    working_interval_s: float = 1.0  # how often prefill says WORKING while it has nothing to send
    beat_interval_s: float = 1.0  # Fleet.Report, both ways
    release_s: float = 1.0  # a forced-closed transfer must let go of its memory; then quarantine
    stuck_step_s: float = 60.0  # a step that runs longer is a stuck loop: not ready, and silence
    request_s: float = 600.0  # a request that names no deadline
    drain_s: float = 30.0  # SIGTERM to exit
    worker_start_s: float = 180.0  # a worker process until it is ready


DEADLINES = Deadlines()
