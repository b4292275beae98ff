"""What operators and tools look at: models, liveness, readiness, status, metrics."""

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from dspark.ops.metrics import CONTENT_TYPE
from dspark_services.scheduler.api.gateway import Gateway


def operation_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(gateway, started)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        gateway.check_model(name)
        return _model(gateway, started)

    @router.get("/health")
    async def health() -> dict[str, str]:
        """This process lives; whether it can serve is what /ready says."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 if requests are served; a missing drafter only makes them slower."""
        driver = gateway.driver
        if driver is None:
            return JSONResponse({"status": "starting", "missing": ["workers"]}, 503)
        status = driver.status
        present = {"verifier": status.verifier_ready, "drafter": status.drafter_ready is not False}
        return JSONResponse(
            {
                "status": "ready" if status.verifier_ready else "not ready",
                "missing": [name for name, there in present.items() if not there],
            },
            200 if status.verifier_ready else 503,
        )

    @router.get("/status")
    async def status() -> dict[str, Any]:
        """What was decided at start and what is going on; `cost` null: nothing can be judged."""
        settings, driver = gateway.settings, gateway.driver
        common = {
            "model": settings.model_name,
            "planner": settings.planner,
            "transport": settings.transport,
        }
        if driver is None:
            return common | {"driver": None}
        return common | {
            "driver": asdict(driver.status),
            "target": asdict(driver.target),
            "calibration": [
                stream._asdict() | asdict(own) for stream, own in driver.calibration.items()
            ],
            "cost": None if driver.cost is None else asdict(driver.cost),
        }

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)

    return router


def pause_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause() -> dict[str, str]:
        """Answers when no step is in flight any more."""
        await gateway.started.pause()
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        gateway.started.resume()
        return {"status": "resumed"}

    return router


def _model(gateway: Gateway, created: int) -> dict[str, Any]:
    name = gateway.settings.model_name
    model = {"id": name, "object": "model", "created": created, "owned_by": "dspark"}
    driver = gateway.driver
    return model if driver is None else model | {"max_model_len": driver.target.max_context}
