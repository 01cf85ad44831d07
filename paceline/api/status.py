"""`/v1/status`: who is linked, what runs, and what was sent, for `paceline status`.

Names devices, so a key needs the scope `devices`, or all. No question, answer or document is in it.
"""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.errors import encode_json
from paceline.api.routes import Route
from paceline.runtime.service import Service


class Status:
    """The route, and the service and admission control it reports on."""

    def __init__(self, service: Service, admission: AdmissionControl) -> None:
        self._service = service
        self._admission = admission

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path="/v1/status",
                endpoint=self.show,
                summary="Say who is linked, what runs, and how many bytes of which kind were sent.",
                scope="devices",
            ),
        )

    async def show(self, request: Request) -> Response:  # noqa: ARG002  # an endpoint's signature
        readiness = self._service.readiness()
        body = {
            "version": __version__,
            "side": self._service.side,
            "ready": readiness.ready and not self._admission.draining,
            "model": readiness.detail.get("model"),
            "documents": readiness.detail.get("documents"),
            "keys_required": self._admission.keyring.required,
            "requests": self._admission.active,
            "load": asdict(self._service.load()),
            "links": [asdict(link) for link in self._service.links()],
        }
        return Response(encode_json(body), media_type="application/json")
