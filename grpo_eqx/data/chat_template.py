"""Chat templates: messages to the text that a model reads, which depends on nothing else."""

import calendar
import contextlib
import functools
import locale
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from grpo_eqx.common.errors import UserError, first_line, listed
from grpo_eqx.data.prompts import Conversation
from grpo_eqx.data.special_tokens import opened_at_end, opened_by_turn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Form in which Python prints objects without a text."""


class ChatTemplate:
    """The chat template of a tokenizer, at a fixed moment.

    A template may ask for the time (`strftime_now`) and draw at random (`lipsum`, the filter
    `random`). Here, the clock stands still, days and months have English names, and draws depend on
    the messages. So the same messages make the same text, in every process and on every day.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None, moment: datetime):
        """**Arguments:**

        - `tokenizer`: a tokenizer of transformers.
        - `system_prompt`: the text of a system message, for messages without one.
        - `moment`: the time, for templates that ask for it.
        """
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.moment = moment
        self.asked_for_time = False
        """Whether any text so far asked for the time."""
        self.drew = False
        """Whether any text so far drew at random."""

    @property
    def exists(self) -> bool:
        return self.tokenizer.chat_template is not None

    @functools.cached_property
    def opened(self) -> str:
        """Tags that the prompt opens for the assistant, such as `<think>`, and the text after them.

        The same for all messages.
        """
        messages = [{"role": "user", "content": "1 + 1?"}]
        whole, closed = self.render(messages), ""
        with contextlib.suppress(UserError):  # some templates always open
            closed = self.render(messages, opens=False)
        own = whole.removeprefix(closed)
        return opened_by_turn(own) if own not in ("", whole) else opened_at_end(whole)

    @property
    def time(self) -> str | None:
        """The moment in ISO 8601, if the template may ask for it."""
        asks = "strftime_now" in str(self.tokenizer.chat_template)  # of one template or several
        return self.moment.isoformat() if asks else None

    def render(
        self,
        messages: Conversation,
        *,
        opens: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Renders messages.

        **Arguments:**

        - `messages`: the messages.
        - `opens`: whether the start of the assistant's message follows.
        - `tools`: schemas of the functions that the assistant can call.

        Raises `UserError` if the template fails on them.
        """
        adds_system = self.system_prompt is not None and messages[0]["role"] != "system"
        if adds_system:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            with self._standing_still(repr(messages)):
                return self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=opens,
                    # Llama's template renders text about tools even for an empty list.
                    tools=list(tools) or None,
                )  # fmt: skip
        except Exception as error:  # of any class, also raised on purpose
            roles = listed([message["role"] for message in messages])
            fix = "set chat_template to a file with another"
            if adds_system:
                fix = f"leave system_prompt unset, with its text in the problems, or {fix}"
            raise UserError(
                f"the tokenizer's chat template cannot render a {roles} message "
                f"({first_line(error)}): {fix}."
            ) from error

    def check(self) -> None:
        """Raises `UserError` for a template that loses or changes messages."""
        probes = ["the first probe", "the second probe"]
        first, second = (self.render([{"role": "user", "content": text}]) for text in probes)
        if first == second:
            raise UserError(
                "the chat template leaves out the user's message, so that all prompts are the "
                "same: fix it, or use the model's own."
            )
        if self.system_prompt is not None and self.system_prompt.strip() not in first:
            raise UserError(
                "the chat template leaves out the system message, so that system_prompt would do "
                "nothing: leave it unset, or use a template with system messages."
            )
        if _ADDRESS.search(first) and not _ADDRESS.search(self.system_prompt or ""):
            raise UserError(
                f"the chat template prints an object of Python, whose text differs in every "
                f"process ({_ADDRESS.sub(' at ...', first)!r}): fix the template, as with the "
                f"filter list after map or select."
            )

    @contextlib.contextmanager
    def _standing_still(self, seed: str) -> Iterator[None]:
        """Fixes the clock, the locale and the seed that a template can read; notes their use."""
        from transformers.utils import chat_template_utils

        module: Any = chat_template_utils  # whose function strftime_now calls datetime.now()
        clock, real = _Clock(self.moment), module.datetime
        draws, names = random.getstate(), locale.setlocale(locale.LC_TIME)
        try:
            module.datetime = clock
            locale.setlocale(locale.LC_TIME, "C")
            random.seed(seed)
            seeded = random.getstate()
            yield
            self.asked_for_time |= clock.asked
            self.drew |= random.getstate() != seeded
        finally:
            module.datetime = real
            locale.setlocale(locale.LC_TIME, names)
            random.setstate(draws)


class _Clock:
    """Clock that stands still, in place of the class `datetime` that `strftime_now` uses."""

    def __init__(self, moment: datetime):
        self.moment = moment
        self.asked = False

    def now(self) -> "_Clock":
        self.asked = True
        return self

    def strftime(self, form: str) -> str:
        """Formats the moment; `%s`, seconds since 1970, is in UTC in any time zone of the host."""
        seconds = str(calendar.timegm(self.moment.timetuple()))
        form = re.sub("%(.)", lambda part: seconds if part[1] == "s" else part[0], form)
        return self.moment.strftime(form)
