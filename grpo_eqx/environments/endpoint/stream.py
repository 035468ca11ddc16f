"""Parts of a streamed completion, in OpenAI's form."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.environments.endpoint.answers import Answer
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.requests import Wanted


class Stream:
    """Parts of one completion.

    Where the model can call functions, its turn is sent as a whole: only then is it known what in
    it is a call.
    """

    def __init__(
        self,
        answer: Answer,
        wanted: Wanted,
        choice: Choice,
        tokenizer: ChatTokenizer,
    ):
        """**Arguments:**

        - `answer`: the answer that it is a part of.
        - `wanted`: the request.
        - `choice`: the completion.
        - `tokenizer`: the tokenizer.
        """
        self._answer, self._wanted, self._choice = answer, wanted, choice
        self._tokenizer = tokenizer
        self._num_sent = 0
        """Tokens whose log-probs or ids were sent."""

    def first(self) -> Iterator[Mapping[str, Any]]:
        """Yields what comes before the first token."""
        if self._answer.is_chat:
            yield self._part(delta={"role": "assistant", "content": ""})

    def next(self) -> Iterator[Mapping[str, Any]]:
        """Yields what the tokens since the last call add."""
        choice, has_ended = self._choice, self._choice.finish_reason is not None
        if self._wanted.tools and not has_ended:
            return
        text, more = choice.delta(), self._of_tokens()
        if not self._answer.is_chat:
            if text or more or has_ended:
                yield self._part(text=text, **more)
            return
        message: dict[str, Any] = {"content": text}
        if self._wanted.tools:
            message = {**choice.message}
            del message["role"], message["refusal"]
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
            more["finish_reason"] = choice.message_reason
        if text or more or has_ended:
            yield self._part(delta=message, **more)

    def _of_tokens(self) -> dict[str, Any]:
        """Returns ids and log-probs of tokens that were not sent yet, if they are asked for."""
        start, self._num_sent = self._num_sent, len(self._choice.ids)
        more: dict[str, Any] = {}
        if self._wanted.logprobs and start < self._num_sent:
            more["logprobs"] = self._answer.logprobs(self._choice, start, self._tokenizer)
        if self._wanted.with_ids and start < self._num_sent:
            more["token_ids"] = self._choice.ids[start:]
        return more

    def _part(self, **fields: Any) -> dict[str, Any]:
        reason = self._choice.finish_reason
        return {
            "index": self._choice.index, "logprobs": None, "finish_reason": reason, **fields,
        }  # fmt: skip
