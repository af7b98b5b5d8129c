"""Which path leads to which route, and how errors become vLLM's error bodies."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from relight.agents.stub import controls, openai, probes
from relight.agents.stub.controls import Refused
from relight.agents.stub.engine import Engine, EngineError
from relight.agents.stub.generate import generate
from relight.agents.stub.log import access
from relight.agents.stub.sampling import error_body

Route = Callable[[web.Request, Engine], Awaitable[web.StreamResponse]]
ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)


def application(engine: Engine) -> web.Application:
    """The app of one server."""
    app = web.Application(middlewares=[_errors_and_log], client_max_size=1 << 26)
    app[ENGINE] = engine
    for method, path, route in _TABLE:
        app.router.add_route(method, path, _bound(route))
    return app


def _bound(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def bound(request: web.Request) -> web.StreamResponse:
        return await route(request, request.app[ENGINE])

    return bound


@web.middleware
async def _errors_and_log(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        response = await handler(request)
    except EngineError as error:
        response = web.json_response(error_body(str(error), "InternalServerError", 500), status=500)
    except Refused as error:
        response = web.json_response(error_body(str(error), "Bad Request", 400, error.param), status=400)
    except web.HTTPException as error:
        response = web.json_response({"detail": HTTPStatus(error.status).phrase}, status=error.status)
    if not response.prepared and "X-Request-Id" in request.headers:
        response.headers["X-Request-Id"] = request.headers["X-Request-Id"]
    if "logged" not in request:
        access(request, response.status)
    return response


_TABLE: tuple[tuple[str, str, Route], ...] = (
    ("GET", "/health", probes.health),
    ("GET", "/load", probes.load),
    ("GET", "/metrics", probes.metrics),
    ("GET", "/version", probes.version),
    ("GET", "/v1/models", probes.models),
    ("GET", "/is_paused", probes.is_paused),
    ("POST", "/pause", controls.pause),
    ("POST", "/resume", controls.resume),
    ("GET", "/is_sleeping", probes.is_sleeping),
    ("POST", "/sleep", controls.sleep),
    ("POST", "/wake_up", controls.wake_up),
    ("GET", "/weight_info", probes.weight_info),
    ("POST", "/update_weight_version", controls.update_weight_version),
    ("GET", "/get_world_size", controls.get_world_size),
    ("POST", "/init_weight_transfer_engine", controls.transfer),
    ("POST", "/start_weight_update", controls.transfer),
    ("POST", "/update_weights", controls.transfer),
    ("POST", "/finish_weight_update", controls.transfer),
    ("POST", "/shutdown_weight_transfer_engine", controls.transfer),
    ("POST", "/weight_checker", controls.weight_checker),
    ("POST", "/reset_prefix_cache", controls.reset_prefix_cache),
    ("POST", "/collective_rpc", controls.collective_rpc),
    ("POST", "/abort_requests", controls.abort_requests),
    ("POST", "/inference/v1/generate", generate),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/chat/completions", openai.chat),
    ("POST", "/v1/completions/render", openai.render_completion),
    ("POST", "/v1/chat/completions/render", openai.render_chat),
    ("POST", "/v1/completions/derender", openai.derender),
    ("GET", "/stub/knobs", controls.knobs),
    ("POST", "/stub/knobs", controls.knobs),
)
