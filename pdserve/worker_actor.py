"""The Ray actor that starts and watches one worker process.

Ray places the actor, keeps its resources and starts it again when it ends; the worker itself is a child process
that Ray knows nothing of, so Ray is never on a token's path.

1. The actor starts `pdserve worker` and reads its beats (`WatchedChild`).
2. The child dies, or is killed for its silence: the actor process ends, and Ray starts the actor anew, anywhere
   in the cluster, which starts a new child, which joins the routers.
3. The actor process dies: the kernel kills the child; the rest as in 2.
4. The driver dies: Ray ends its actors; the rest as in 3, without a new start.
5. `stop` drains the child; then whoever called it kills the actor for good.
"""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import ray
from ray.util import get_node_ip_address

from pdserve.child import ChildEnd, ChildSpec, WatchedChild

LAST_WORDS_S = 0.5  # between the child's end and the actor's: `watch` tells why


@ray.remote(max_restarts=-1, max_concurrency=4)
class WorkerActor:
    """Its methods block, each in a thread of Ray's. Arguments travel through Ray's control store."""

    def __init__(self, spec: ChildSpec, is_on_other_machines: bool) -> None:
        """`is_on_other_machines`: the child tells the address of this node, and logs to a folder of its own."""
        if is_on_other_machines:
            folder = Path(tempfile.mkdtemp(prefix="pdserve-"))
            advertise = f"--advertise={get_node_ip_address()}"
            spec = replace(spec, arguments=(*spec.arguments, advertise), log_file=folder / spec.log_file.name)
        self._child = WatchedChild(spec)
        self._child.start()
        threading.Thread(target=self._end_with_child, name="end with child", daemon=True).start()

    def wait_started(self) -> int:
        """The child's process id, once it has beaten for the first time."""
        return self._child.started.result()

    def watch(self) -> ChildEnd:
        """Returns when the child has ended, whatever the reason; soon after, so does the actor."""
        return self._child.ended.result()

    def stop(self) -> ChildEnd:
        """Drain the child, and kill it when the time is up. The actor stays, and starts no other."""
        return self._child.stop()

    def _end_with_child(self) -> None:
        end = self._child.ended.result()
        if not end.was_asked:
            threading.Event().wait(LAST_WORDS_S)
            os._exit(1)  # for Ray: an end that nobody wanted
