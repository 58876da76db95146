"""What the HTTP and the gRPC front share: one intake, one generator, one count."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field

from pdserve_wire.errors import PdserveError
from router.access import ApiKeys
from router.generation import Generator
from router.intake import Intake
from router.metrics import RouterMetrics
from router.scope import RequestScope
from router.timelines import Timelines

_CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Front:
    """Handed to `make_app` and `add_grpc_front`; belongs to one event loop."""

    intake: Intake
    generator: Generator
    metrics: RouterMetrics
    timelines: Timelines = field(default_factory=Timelines)
    api_keys: ApiKeys = field(default_factory=ApiKeys)

    def open_scope(self, prefix: str, client_id: str | None) -> RequestScope:
        """The scope of a request that arrives now. Its own id is unique, whatever id the client gave."""
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        return RequestScope(self.metrics, self.timelines, request_id, checked_client_id(client_id) or "")


def checked_client_id(client_id: str | None) -> str | None:
    """A client's `x-request-id` where it is fit to be logged and sent back, or None."""
    return client_id if client_id is not None and _CLIENT_ID.fullmatch(client_id) else None


def retry_advice(error: PdserveError) -> str:
    """What a client is told of a failure that is not its own: the request may be sent again."""
    return error.message if "retry" in error.message else f"{error.message}; retry later"
