"""The endpoint: OpenAI's routes, as an ASGI application."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.environments.chat_format import ChatFormat, ChatFormats
from grpo_eqx.environments.endpoint.answers import Answer, error_body, usage
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.clients import Client, Encode, Turn
from grpo_eqx.environments.endpoint.exchange import EndedError, Exchange, OverloadedError
from grpo_eqx.environments.endpoint.requests import (
    RequestError,
    Wanted,
    as_message,
    read_chat,
    read_text,
)
from grpo_eqx.environments.endpoint.stream import Stream

_MOST_BYTES = 4 << 20
"""Limit on the body of a request."""
_MOST_SECONDS = 60.0
"""Limit on the time in which a client sends it."""
_GONE = 499
"""Status for clients that hang up, which they never see."""


class Endpoint:
    """A model at OpenAI's routes."""

    def __init__(
        self,
        exchange: Exchange,
        chat: ChatFormats,
        model: str,
        client_of: Callable[[str], Client | None],
    ):
        """**Arguments:**

        - `exchange`: completes requests.
        - `chat`: the tokenizer, and its formats of dialogues.
        - `model`: name of the model.
        - `client_of`: returns the client with an API key, "" for none; `None` refuses it.
        """
        self._exchange, self._model, self._client_of = exchange, model, client_of
        self._chat, self._tokenizer = chat, chat.tokenizer
        self._numbers = itertools.count()
        self.num_answered = 0
        """Requests that were answered."""
        self.num_tokens = 0
        """Tokens that were drawn for them."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self._complete_chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete_text), methods=["POST"]),
            Route("/v1/models", self._guarded(self._list_models), methods=["GET"]),
            Route("/health", self._tell_health, methods=["GET"]),
            Route("/metrics", self._guarded(self._tell_metrics), methods=["GET"]),
        ]
        handlers: Any = {HTTPException: _refuse_route, RequestError: _refuse}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler that checks the key first, and refuses what cannot be answered."""

        async def guarded(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            client = self._client_of(given if scheme.lower() == "bearer" else "")
            if client is None:
                raise RequestError(
                    401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                )  # fmt: skip
            request.state.client = client
            try:
                return await answer(request)
            except (OverloadedError, EndedError) as error:
                raise _refusal_of(error) from None
            except ClientDisconnect:
                return Response(status_code=_GONE)

        return guarded

    async def _tell_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _tell_metrics(self, request: Request) -> Response:
        """Answers in the text format of Prometheus."""
        values = {
            "requests_open": self._exchange.num_open,
            "requests_answered_total": self.num_answered,
            "tokens_drawn_total": self.num_tokens,
        }
        lines = (f"grpo_eqx_{name} {value}\n" for name, value in values.items())
        return PlainTextResponse("".join(lines))

    async def _list_models(self, request: Request) -> Response:
        length = self._exchange.session.max_length
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "grpo_eqx"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": length}]})

    async def _complete_chat(self, request: Request) -> Response:
        wanted = read_chat(await _body(request), self._model)
        assert wanted.messages is not None
        try:
            chat = self._chat.of(has_tools=True) if wanted.tools else None
        except UserError as error:
            raise RequestError(400, str(error), "tools") from error
        messages, tools = list(wanted.messages), wanted.tools
        tokenizer = self._tokenizer.with_tools({None: tools} if tools else {})

        def encode() -> Sequence[Sequence[int]]:
            try:
                return tokenizer.encode_prompts([Prompt(messages, {})])
            except UserError as error:
                raise RequestError(400, str(error), "messages") from error

        return await self._answer(request, wanted, encode, chat, is_chat=True)

    async def _complete_text(self, request: Request) -> Response:
        wanted, prompts = read_text(await _body(request), self._model), list[Sequence[int]]()
        vocab_size = len(self._tokenizer.tokenizer)
        for each in wanted.prompts:
            if not isinstance(each, str):
                if not all(0 <= x < vocab_size for x in each):
                    raise RequestError(400, f"a token is not among {vocab_size}", "prompt")
                prompts.append(each)
                continue
            try:
                prompts += self._tokenizer.encode_prompts([Prompt(each, {}, plain=True)])
            except UserError as error:
                raise RequestError(400, str(error), "prompt") from error
        return await self._answer(request, wanted, lambda: prompts, None, is_chat=False)

    async def _answer(
        self,
        request: Request,
        wanted: Wanted,
        encode: Encode,
        chat: ChatFormat | None,
        *,
        is_chat: bool,
    ) -> Response:
        """Completes prompts, all at once."""
        answer = Answer.begun(f"{next(self._numbers)}", self._model, is_chat=is_chat)
        client: Client = request.state.client
        turns = client.begin(wanted, encode)
        choices = [
            Choice(n, turn.request.ids, wanted, chat, self._tokenizer)
            for n, turn in enumerate(turns)
        ]
        if wanted.stream:
            parts = self._streamed(answer, wanted, turns, choices)
            return StreamingResponse(parts, media_type="text/event-stream")
        with _dropping(turns) as left:
            if not await self._made(request, turns, choices):
                return Response(status_code=_GONE)
            for turn, choice in zip(turns, choices, strict=True):
                left.remove(turn)
                turn.end(choice, wanted, _message_of(wanted, choice))
        self._count(choices)
        return JSONResponse(answer.whole(wanted, choices, self._tokenizer))

    async def _made(
        self, request: Request, turns: Sequence[Turn], choices: Sequence[Choice]
    ) -> bool:
        """Draws completions; returns `False` if the client hangs up before that."""
        async with _cancelled_at_end() as tasks:
            work = [
                asyncio.create_task(self._fill(*each)) for each in zip(turns, choices, strict=True)
            ]
            gone = asyncio.create_task(_until_gone(request))
            tasks += [*work, gone]
            made: asyncio.Future[Any] = asyncio.gather(*work)
            either: list[asyncio.Future[Any]] = [made, gone]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                made.cancel()
                return False
            made.result()
        return True

    async def _fill(
        self, turn: Turn, choice: Choice, note: Callable[[], None] = lambda: None
    ) -> None:
        """Draws a completion, and calls `note` whenever more tokens of it follow."""
        async with contextlib.aclosing(self._exchange.complete(turn.request)) as parts:
            async for drawn in parts:
                choice.add(drawn)
                if choice.finish_reason is not None:
                    return
                note()

    async def _streamed(
        self, answer: Answer, wanted: Wanted, turns: Sequence[Turn], choices: Sequence[Choice]
    ) -> AsyncIterator[str]:
        """Yields the events of a streamed answer."""
        parts: asyncio.Queue[Mapping[str, Any] | OverloadedError | EndedError | None]
        parts = asyncio.Queue()

        async def follow(turn: Turn, choice: Choice) -> None:
            stream = Stream(answer, wanted, choice, self._tokenizer)

            def send(made: Iterable[Mapping[str, Any]]) -> None:
                for part in made:
                    parts.put_nowait(part)

            try:
                send(stream.first())
                await self._fill(turn, choice, lambda: send(stream.next()))
                left.remove(turn)
                turn.end(choice, wanted, _message_of(wanted, choice))
                send(stream.next())
                parts.put_nowait(None)
            except (OverloadedError, EndedError) as error:
                parts.put_nowait(error)

        with _dropping(turns) as left:
            async with _cancelled_at_end() as tasks:
                tasks += [
                    asyncio.create_task(follow(*each)) for each in zip(turns, choices, strict=True)
                ]
                num_open = len(choices)
                while num_open:
                    part = await parts.get()
                    if part is None:
                        num_open -= 1
                    elif isinstance(part, OverloadedError | EndedError):
                        yield _event(error_body(_refusal_of(part)))
                        return
                    else:
                        yield _event(answer.chunk([part]))
        if wanted.with_usage:
            yield _event(answer.chunk([], usage=usage(wanted, choices)))
        self._count(choices)
        yield "data: [DONE]\n\n"

    def _count(self, choices: Sequence[Choice]) -> None:
        self.num_answered += 1
        self.num_tokens += sum(len(choice.ids) for choice in choices)


async def _body(request: Request) -> Any:
    """Reads the JSON of a request; raises `RequestError` if it is too long or is none."""
    too_long = RequestError(
        413, f"the body has more than {_MOST_BYTES >> 20} MiB", code="request_too_large"
    )
    if int(request.headers.get("content-length") or 0) > _MOST_BYTES:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > _MOST_BYTES:
                    raise too_long
    except TimeoutError:
        raise RequestError(408, "the body did not come in time") from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not JSON") from None


@contextlib.contextmanager
def _dropping(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yields a list of turns, and drops those that are still in it at the end of the block."""
    left = [*turns]
    try:
        yield left
    finally:
        for turn in left:
            turn.drop()


def _message_of(wanted: Wanted, choice: Choice) -> dict[str, Any] | None:
    """Returns a completion as chat templates read it; `None` where requests have texts."""
    return None if wanted.messages is None else as_message(choice.message)


async def _until_gone(request: Request) -> None:
    """Waits until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _cancelled_at_end() -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Yields a list of tasks that end with the block."""
    tasks: list[asyncio.Task[Any]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _refusal_of(error: OverloadedError | EndedError) -> RequestError:
    if isinstance(error, EndedError):
        return RequestError(503, "the server is shutting down")
    return RequestError(
        429, "too many requests are under way: try again later", code="rate_limit_exceeded"
    )


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not supported"
    return _refuse(request, RequestError(error.status_code, message))
