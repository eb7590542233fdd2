"""Whose a request is and what it may expect: its class, its tenant, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InvalidRequest
from router.front.keys import Holder
from router.front.parsing import shown
from router.front.schema import GenerationRequest
from router.slo.classes import SLOClass, SLOConfig

HEADER = b"x-kvferry-class"


@dataclass(frozen=True)
class Standing:
    """What generations of a request have in common; fields as in ``Generation``."""

    slo_class: str
    tenant: str
    weight: float
    priority: int
    timeout: float | None


def standing_of(slo: SLOConfig, request: GenerationRequest, header: bytes, holder: Holder | None) -> Standing:
    """The standing of a request.

    Its class is that of its key, where that has one; else what the header names, the field ``slo_class``, or OpenAI's
    ``service_tier``, where that is a class here; else the default. Tenants are keys, or where there are none, salts:
    who shares no cache shares no turn either.

    Args:
        slo: the classes.
        request: what the client wants.
        header: ``x-kvferry-class``; empty where there is none.
        holder: of its key; None where none is needed.

    Raises:
        InvalidRequest: it names a class that is not there, or not its key's.
    """
    kind = _class_of(slo, request, header, holder)
    return Standing(
        slo_class=kind.name,
        tenant=f"key {holder.key.name}" if holder is not None else request.cache_salt or "",
        weight=1.0 if holder is None else holder.key.weight,
        priority=kind.priority if request.priority is None else request.priority,
        timeout=request.timeout if request.timeout is not None else kind.deadline or None,
    )


def _class_of(slo: SLOConfig, request: GenerationRequest, header: bytes, holder: Holder | None) -> SLOClass:
    own = None if holder is None else holder.key.slo_class
    field, name = ("slo_class", request.slo_class) if not header else (HEADER.decode(), header.decode("latin-1"))
    if name is None:
        tier = request.service_tier if request.service_tier in slo.names else ""
        return slo.of(own or tier or "")
    if name not in slo.names:
        raise InvalidRequest(f"{field} must be one of {', '.join(slo.names)}, got {shown(name)}", field=field)
    if own is not None and own != name:
        raise InvalidRequest(f"{field} must be {own}, the class of this key, got {shown(name)}", field=field)
    return slo.of(name)
