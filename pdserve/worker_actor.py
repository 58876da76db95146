"""The Ray actor that starts and watches one worker process.

Ray places the actor, keeps its resources and starts it again when it ends; the worker itself is a child process
that Ray knows nothing of, so Ray is never on a token's path.

1. The actor starts `pdserve worker` and reads its beats (`WatchedChild`).
2. The child dies, or is killed for its silence: the actor process ends, and Ray starts the actor anew, on any
   node with room, which starts a new child, which joins the routers.
3. The actor process dies: the kernel kills the child; the rest as in 2.
4. The driver dies: Ray ends its actors, the kernel their children.
5. `stop` drains the child; whoever called it then ends the actor for good.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from pdserve.child import ChildEnd, ChildSpec, WatchedChild

LAST_WORDS_S = 0.5  # between the child's end and the actor's, so that `watch` can tell why


class WorkerActor:
    """One method call, one thread of Ray's; each may block."""

    def __init__(self, spec: ChildSpec, is_on_any_node: bool) -> None:
        """With `is_on_any_node` the child is told this node's address, and logs to a folder made here."""
        self._own_folder: Path | None = None
        if is_on_any_node:
            with contextlib.suppress(PermissionError):  # Ray's workers are nice (15), and children are as their parents
                os.setpriority(os.PRIO_PROCESS, 0, 0)
            self._own_folder = folder = Path(tempfile.mkdtemp(prefix="pdserve-"))
            advertise = f"--advertise={ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
            spec = replace(spec, arguments=(*spec.arguments, advertise), log_file=folder / spec.log_file.name)
        self._child = WatchedChild(spec)
        self._child.start()
        threading.Thread(target=self._end_with_child, name="end with child", daemon=True).start()

    def wait_started(self) -> int:
        """The child's process id, once it has beaten. Of one that has ended nothing is told: the next one will do."""
        pid = self._child.started.result()
        if self._child.ended.done():
            threading.Event().wait()  # until this process ends
        return pid

    def watch(self) -> ChildEnd:
        """Returns when the child has ended; unless it was asked to, so does the actor, a moment later."""
        return self._child.ended.result()

    def stop(self) -> ChildEnd:
        """Drain the child, and kill it when the time is up. The actor stays, and starts no other."""
        end = self._child.stop()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
        return end

    def _end_with_child(self) -> None:
        end = self._child.ended.result()
        if not end.was_asked:
            threading.Event().wait(LAST_WORDS_S)
            os._exit(1)  # to Ray an end that nobody wanted


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """What Ray keeps for an actor, and whether it may choose among nodes."""

    num_cpus: float = 1
    num_gpus: float = 0
    is_on_any_node: bool = False


class WorkerHandle:
    """A worker's actor, as its driver sees it. For one event loop of a process that `ray.init` connected."""

    def __init__(self, spec: ChildSpec, place: ActorPlace) -> None:
        """Ask Ray for the actor; it comes when there is room."""
        self.name = spec.name
        self._actor: Any = (
            ray.remote(WorkerActor)
            .options(
                max_restarts=-1,
                max_concurrency=4,
                num_cpus=place.num_cpus,
                num_gpus=place.num_gpus,
                scheduling_strategy="SPREAD" if place.is_on_any_node else "DEFAULT",
            )
            .remote(spec, place.is_on_any_node)
        )

    async def wait_started(self) -> int:
        """The process id of the child, also of one that a restarted actor is yet to start."""
        pid: int
        try:
            pid = await self._actor.wait_started.remote()
        except RayActorError:  # between two lives; not asked for at first, for Ray tells of each retry
            pid = await self._actor.wait_started.options(max_task_retries=-1).remote()
        return pid

    async def wait_ended(self) -> ChildEnd:
        """How the present child, or its actor, ended. Ray then starts both anew."""
        try:
            end: ChildEnd = await self._actor.watch.remote()
        except RayActorError:
            return ChildEnd("its actor ended", "")
        return end

    async def stop(self) -> None:
        """Drain the child and end the actor; Ray starts no other."""
        try:
            await self._actor.stop.remote()
        except RayActorError:
            pass  # between two lives: there is nothing to drain
        self.kill()

    def kill(self) -> None:
        """End the actor for good, at once; the kernel ends its child."""
        ray.kill(self._actor, no_restart=True)
