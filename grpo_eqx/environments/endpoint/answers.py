"""Bodies of answers, in OpenAI's form."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.requests import RequestError, Wanted

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Answer(NamedTuple):
    """Facts that all parts of an answer share."""

    number: str
    """Its id."""
    model: str
    is_chat: bool
    created: int

    @classmethod
    def begun(cls, number: str, model: str, *, is_chat: bool) -> "Answer":
        prefix = "chatcmpl" if is_chat else "cmpl"
        return cls(f"{prefix}-{number}", model, is_chat, int(time.time()))

    def whole(
        self,
        wanted: Wanted,
        choices: Sequence[Choice],
        tokenizer: ChatTokenizer,
    ) -> dict[str, Any]:
        """Returns the body of an answer.

        **Arguments:**

        - `wanted`: the request.
        - `choices`: the completions, those of a prompt one after the other.
        - `tokenizer`: the tokenizer.
        """
        body = self._body("" if self.is_chat else None)
        body["choices"] = [self._choice(wanted, choice, tokenizer) for choice in choices]
        if wanted.with_ids and self.is_chat:
            body["prompt_token_ids"] = list(choices[0].prompt)
        body["usage"] = usage(wanted, choices)
        return body

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Returns the body of a part of a streamed answer."""
        return {**self._body(".chunk"), "choices": list(choices), **more}

    def _body(self, kind: str | None) -> dict[str, Any]:
        name = "text_completion" if kind is None or not self.is_chat else f"chat.completion{kind}"
        return {"id": self.number, "object": name, "created": self.created, "model": self.model}

    def _choice(self, wanted: Wanted, choice: Choice, tokenizer: ChatTokenizer) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index, "logprobs": None}
        if self.is_chat:
            body |= {"finish_reason": choice.message_reason, "message": choice.message}
        else:
            body |= {"finish_reason": choice.finish_reason, "text": choice.text}
        if wanted.logprobs:
            body["logprobs"] = self.logprobs(choice, 0, tokenizer)
        if wanted.with_ids:
            body["token_ids"] = choice.ids
            if not self.is_chat:
                body["prompt_token_ids"] = list(choice.prompt)
        return body

    def logprobs(self, choice: Choice, start: int, tokenizer: ChatTokenizer) -> dict[str, Any]:
        """Returns the log-probs of a completion's tokens from `start` on.

        They are those under the distribution that each token was drawn from.
        """
        ids, logps = choice.ids[start:], choice.logps[start:]
        texts = tokenizer.token_texts(ids)
        if not self.is_chat:
            ends = [0]
            for text in texts:
                ends.append(ends[-1] + len(text))
            tops = [{text: logp} for text, logp in zip(texts, logps, strict=True)]
            return {
                "tokens": texts, "token_logprobs": logps, "top_logprobs": tops,
                "text_offset": ends[:-1],
            }  # fmt: skip
        content = [
            {
                "token": text,
                "logprob": logp,
                "bytes": list(text.encode(errors="replace")),
                "top_logprobs": [],
            }
            for text, logp in zip(texts, logps, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage(wanted: Wanted, choices: Sequence[Choice]) -> dict[str, int]:
    """Returns the counts of tokens."""
    read = sum(len(each.prompt) for each in choices[:: wanted.n])
    drawn = sum(len(each.ids) for each in choices)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def error_body(error: RequestError) -> dict[str, Any]:
    """Returns the body of a refusal."""
    kind = _TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {
        "error": {
            "message": str(error), "type": kind, "param": error.param, "code": error.code or None,
        }
    }  # fmt: skip
