"""`/v1/models`, `/healthz`, `/readyz`: what is here, whether it lives, whether it can be asked.

Front ends fill their menus from the list; agents read the context's length from `max_model_len` or `meta.n_ctx`.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.encoding import encode_json
from paceline.api.gate import Gate
from paceline.api.requests import find_model
from paceline.engine.contract import ModelInfo
from paceline.runtime.service import Service


class Catalog:
    def __init__(self, service: Service, gate: Gate) -> None:
        self._service = service
        self._gate = gate
        self._created = int(time.time())  # of this process: a model's own age is not known

    async def list_models(self) -> Response:
        return _json({"object": "list", "data": [self._entry(model) for model in self._service.models()]})

    async def show_model(self, request: Request) -> Response:
        return _json(self._entry(find_model(self._service.models(), request.path_params["name"])))

    async def health(self) -> Response:
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        readiness = self._service.readiness()
        ready = readiness.ready and not self._gate.draining
        return _json({"ready": ready, "side": self._service.side, **readiness.detail}, 200 if ready else 503)

    def _entry(self, model: ModelInfo) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": model.max_positions,
            "meta": {"n_ctx": model.max_positions, "n_vocab": model.vocab_size},
            "paceline": {
                "side": self._service.side,
                "backend": model.backend,
                "dtype": model.dtype,
                "strategies": list(self._service.strategies()),
            },
        }


def _json(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status_code=status, media_type="application/json")
