"""`/v1/status`: who is linked, what runs, and what was sent, for `paceline status`.

Names devices, so a key needs the scope `devices`, or all. No question, answer or document is in it.
"""

from __future__ import annotations

from dataclasses import asdict

from paceline import __version__
from paceline.api.http.routing import AdmissionDep, ServiceDep
from paceline.api.openapi import keyed_router

router = keyed_router("devices", "devices")


@router.get("/v1/status")
async def status(service: ServiceDep, admission: AdmissionDep) -> dict[str, object]:
    """Say who is linked, what runs, and how many bytes of which kind were sent."""
    readiness = service.readiness()
    return {
        "version": __version__,
        "side": service.side,
        "ready": readiness.ready and not admission.draining,
        "model": readiness.detail.get("model"),
        "documents": readiness.detail.get("documents"),
        "keys_required": admission.keyring.required,
        "requests": admission.active,
        "load": asdict(service.load()),
        "links": [asdict(link) for link in service.links()],
    }
