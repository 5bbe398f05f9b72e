"""Who asks which service: what every call begins with."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from etude.service.server.service import Refusal, Service


def serving(request: Request) -> Service:
    """Return the service that a request reached."""
    found: Service = request.app.state.service
    return found


_KEY = APIKeyHeader(name="X-API-Key", auto_error=False, description="Also as a bearer token; not needed on loopback.")


def asking(request: Request, _: Annotated[str | None, Security(_KEY)]) -> str:
    """Return who asks; refuse strangers."""
    owner: str | None = request.app.state.keys.owner(request.headers)
    if owner is None:
        raise Refusal(401, "the key (header X-API-Key) is missing or unknown")
    return owner


Served = Annotated[Service, Depends(serving)]
Owner = Annotated[str, Depends(asking)]
