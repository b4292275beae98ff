"""The HTTP application: OpenAI's API over one gateway."""

from fastapi import APIRouter, FastAPI, Request, Response

from dspark_services.scheduler.api import errors
from dspark_services.scheduler.api.answers import answer
from dspark_services.scheduler.api.body_guard import BodyGuard
from dspark_services.scheduler.api.gateway import Gateway
from dspark_services.scheduler.api.layouts import ChatLayout, CompletionLayout
from dspark_services.scheduler.api.operations import operation_routes, pause_routes
from dspark_services.scheduler.api.schema import ChatBody, CompletionBody


def create_app(gateway: Gateway) -> FastAPI:
    """The application; until the gateway is open, generation is refused with 503."""
    app = FastAPI(title="DSpark Serve")
    errors.install(app)
    app.add_middleware(BodyGuard, max_bytes=gateway.settings.max_body_bytes)
    app.include_router(operation_routes(gateway))
    if gateway.settings.pausable:
        app.include_router(pause_routes(gateway))
    app.include_router(_generation_routes(gateway))
    return app


def _generation_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/v1")
    model = gateway.settings.model_name

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        generation = await gateway.complete(body)
        return await answer(request, body, generation, CompletionLayout(model))

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        generation = await gateway.chat(body)
        return await answer(request, body, generation, ChatLayout(model))

    return router
