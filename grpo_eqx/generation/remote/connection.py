"""Requests to one server over HTTP, with errors by what follows from them."""

from typing import Any

import httpx

from grpo_eqx.common.errors import UserError, class_name, first_line, printable

API_KEY = "GRPO_EQX_SAMPLER_API_KEY"
"""Environment variable with the API key of the servers."""
_LONGEST_REASON = 300
_BUSY = 408, 429


class FailedError(Exception):
    """A server does not answer, or answers that it cannot: a later request may succeed."""


class LateError(FailedError):
    """A server has not answered in time."""


class RefusedError(Exception):
    """A server refuses a request, and would refuse it again."""

    def __init__(self, status: int, reason: str):
        """**Arguments:**

        - `status`: status of the answer.
        - `reason`: the server's words.
        """
        super().__init__(f"status {status}: {reason}")
        self.status = status


class AnswerError(Exception):
    """An answer is not what was asked for."""


class Connection:
    """Requests to one server."""

    def __init__(self, address: str, client: httpx.AsyncClient):
        """**Arguments:**

        - `address`: address of the server, as in `http://host:8000`.
        - `client`: sends the requests, with its limits of time.
        """
        self.address, self._client = address, client

    async def get(self, path: str) -> Any:
        """Returns the JSON at a path; raises as `post` does."""
        return await self._ask("GET", path, None)

    async def find(self, path: str) -> dict[str, Any] | None:
        """Returns the JSON object at a path; `None` where there is none."""
        try:
            found = await self.get(path)
        except (RefusedError, AnswerError):
            return None
        return found if isinstance(found, dict) else None

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a body, and returns the JSON of the answer, `None` for an empty one.

        Raises `FailedError`, `RefusedError` or `AnswerError`, and `UserError` where the API key is
        refused.
        """
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = await self._client.request(method, f"{self.address}{path}", json=body)
        except httpx.TimeoutException as error:
            late = FailedError if isinstance(error, httpx.ConnectTimeout) else LateError
            raise late(f"{path} has not answered in time ({class_name(error)})") from error
        except httpx.TransportError as error:
            raise FailedError(f"{path}: {class_name(error)}, {first_line(error)}") from error
        status = answer.status_code
        if status in (401, 403):
            raise UserError(
                f"{self.address} refuses the API key: set the environment variable {API_KEY} to "
                f"the key that the server was started with."
            )
        if status >= 500 or status in _BUSY:
            raise FailedError(f"{path} answers with status {status}: {_reason(answer)}")
        if not answer.is_success:
            raise RefusedError(status, f"{_reason(answer)} ({path})")
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise AnswerError(f"the answer of {path} is not JSON") from error


def _reason(answer: httpx.Response) -> str:
    """Returns what a server says of an error: in the form of OpenAI, FastAPI or SGLang."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    text: Any = answer.text
    if isinstance(body, dict):
        text = body.get("error") or body.get("message") or body.get("detail") or text
    if isinstance(text, dict):
        text = text.get("message", text)
    return printable(" ".join(str(text).split())[:_LONGEST_REASON]) or "no reason given"
