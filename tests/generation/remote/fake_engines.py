"""Servers with the routes of vLLM or SGLang, and completions from elsewhere."""

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Kind = Literal["vllm", "sglang"]
ENGINES: tuple[Kind, ...] = ("vllm", "sglang")
COMPLETES = {"vllm": "/v1/completions", "sglang": "/generate"}
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


class Made(NamedTuple):
    """A completion."""

    ids: list[int]
    logps: list[float]
    reason: str


Complete = Callable[[Mapping[str, Any]], Awaitable[Made]]
"""Completes a request, which has the names of OpenAI's and vLLM's fields."""


class FakeEngine:
    """A server of one engine's routes; tests change what it does."""

    def __init__(self, kind: Kind, complete: Complete, load: Callable[[str], None] | None = None):
        self.kind, self._complete, self._load = kind, complete, load
        self.version = "default"
        self.logprobs_mode = "processed_logprobs"
        self.folders: list[str] = []
        """Folders of the weights that it has loaded."""
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the completions that it was asked for."""
        self.headers: Mapping[str, str] = {}
        self.intercept: Callable[[str], Awaitable[Response | None]] = _nothing
        """Is told each path, and may answer in the engine's place."""
        self.change: Callable[[Made], Made] = lambda made: made
        """Changes a completion before it is sent."""
        self.loads = True
        """Whether it takes the version of weights that it is told to load."""
        self.address = ""
        self.stop: Callable[[], None] = lambda: None
        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST"])]
        self.app = Starlette(routes=routes)

    async def _answer(self, request: Request) -> Response:
        path, content = request.url.path, await request.body()
        body = await request.json() if content else {}
        self.headers = request.headers
        if (answer := await self.intercept(path)) is not None:
            return answer
        answers = self._vllm if self.kind == "vllm" else self._sglang
        found = await answers(path, body)
        return JSONResponse(found) if found is not None else Response(status_code=404)

    async def _vllm(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/version":
                return {"version": "0.33.0"}
            case "/v1/models":
                return {"object": "list", "data": [{"id": "served", "object": "model"}]}
            case "/server_info":
                return {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"] if self.loads else self.version
                return {"success": True, "new_version": body["new_version"]}
            case "/reset_prefix_cache":
                return {}
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                await self._loaded(body["kwargs"]["weights_path"])
                return {"results": [None]}
            case "/v1/completions":
                assert body["model"] == "served"
                made = await self._made(body, body)
                choice = {
                    "index": 0, "text": "", "finish_reason": made.reason, "token_ids": made.ids,
                    "logprobs": {"token_logprobs": made.logps},
                }  # fmt: skip
                return {"choices": [choice], "usage": {"completion_tokens": len(made.ids)}}
        return None

    async def _sglang(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/model_info":
                return {"model_path": "served", "weight_version": self.version}
            case "/update_weights_from_disk":
                await self._loaded(body["model_path"])
                self.version = body["weight_version"] if self.loads else self.version
                return {"success": True, "message": "Succeeded to update model weights."}
            case "/generate":
                params = body["sampling_params"]
                names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
                fields = {names.get(name, name): x for name, x in params.items()}
                made = await self._made(body, {**fields, "prompt": body["input_ids"]})
                pairs = zip(made.logps, made.ids, strict=True)
                meta = {
                    "finish_reason": {"type": made.reason}, "completion_tokens": len(made.ids),
                    "weight_version": self.version,
                    "output_token_logprobs": [[*pair, None] for pair in pairs],
                }  # fmt: skip
                return {"text": "", "output_ids": made.ids, "meta_info": meta}
        return None

    async def _made(self, body: dict[str, Any], fields: Mapping[str, Any]) -> Made:
        self.bodies.append(body)
        return self.change(await self._complete(fields))

    async def _loaded(self, folder: str) -> None:
        assert (Path(folder) / "config.json").exists()
        assert [*Path(folder).glob("*.safetensors")]
        self.folders.append(folder)
        if self._load is not None:
            await asyncio.to_thread(self._load, folder)


@contextlib.contextmanager
def running(engine: FakeEngine) -> Iterator[FakeEngine]:
    """Has a server listen within the block, or until it is stopped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            engine.app,
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
            log_config=None,  # which would close the handlers of pytest
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        engine.address = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def stop() -> None:
            server.should_exit = server.force_exit = True
            thread.join(30)

        engine.stop = stop
        thread.start()
        yield engine
        stop()


async def _nothing(path: str) -> None:
    return None


def random_tokens(vocab_size: int, end: int) -> Complete:
    """Returns what completes requests with tokens that their seeds decide."""

    async def complete(fields: Mapping[str, Any]) -> Made:
        rng, ids = random.Random(fields["seed"]), list[int]()
        while len(ids) < fields["max_tokens"]:
            ids.append(rng.randrange(end, vocab_size))
            if ids[-1] == end:
                break
        reason = "stop" if ids[-1] == end else "length"
        return Made(ids, [-rng.random() for _ in ids], reason)

    return complete
