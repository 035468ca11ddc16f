"""What a chat template renders depends on the messages and the run's moment alone."""

import locale
import random
import time
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.chat_template import ChatTemplate

MOMENT = datetime(2024, 3, 9, 23, 59, 58)
USER = "{{ messages[-1].content }}"
MESSAGES = [{"role": "user", "content": "1 + 1?"}]


def template(text: str, system_prompt: str | None = None) -> ChatTemplate:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = text + USER
    return ChatTemplate(tokenizer, system_prompt, MOMENT)


LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "Today Date: {{ date_string }}\n"
)
"""As in Llama 3.1 and 3.2."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA, "Today Date: 09 Mar 2024\n"),
        ("{{ strftime_now('%Y-%m-%d %H:%M:%S') }} ", "2024-03-09 23:59:58 "),
        ("{% set f = '%A' %}{{ strftime_now(f ~ ', %B') }} ", "Saturday, March "),
        ("{% macro now() %}{{ strftime_now(format='%j') }} {% endmacro %}{{ now() }}", "069 "),
    ],
)
def test_the_time_is_that_of_the_run(text: str, expected: str) -> None:
    dated = template(text)
    assert dated.render(MESSAGES) == expected + "1 + 1?"
    assert dated.asked_for_time
    assert dated.tokenizer.apply_chat_template(MESSAGES, tokenize=False) != expected + "1 + 1?"


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_the_time_does_not_depend_on_the_zone(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        dated = template("{{ strftime_now('%s|%%s|%z|%Z|%c') }} ")
        assert dated.render(MESSAGES) == "1710028798|%s|||Sat Mar  9 23:59:58 2024 1 + 1?"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_it_is_known_whether_what_was_rendered_asked_for_the_time() -> None:
    only_without_system = "{% if messages[0].role != 'system' %}{{ strftime_now('%Y') }}{% endif %}"
    assert not template(USER).asked_for_time
    dated = template(only_without_system, "Think.")
    assert dated.render(MESSAGES) == "1 + 1?"
    assert not dated.asked_for_time
    dated = template(only_without_system)
    assert dated.render(MESSAGES) == "20241 + 1?"
    assert dated.asked_for_time


DRAWS = [
    "{{ range(10 ** 5) | random }} ",
    "{{ lipsum(1) }}",
    "{{ [range(99)] | map('random') | list }}",
]


@pytest.mark.parametrize("text", DRAWS)
def test_draws_depend_on_the_messages(text: str) -> None:
    drawn = template(text)
    others = [{"role": "user", "content": "2 + 2?"}]
    first = drawn.render(MESSAGES)
    assert drawn.render(others) != first.replace("1 + 1?", "2 + 2?")
    assert drawn.render(MESSAGES) == first
    assert drawn.drew
    assert not template(LLAMA).drew


def test_the_draws_of_others_go_on_as_if_nothing_was_rendered() -> None:
    before = random.getstate()
    with template(USER)._standing_still("1 + 1?"):
        random.random()
    assert random.getstate() == before


def test_a_template_that_prints_an_address_is_refused() -> None:
    for text in (
        "{{ messages | map('upper') }}",
        "{{ messages | select }}",
        "{{ raise_exception }}",
    ):
        with pytest.raises(UserError, match=r"prints an object of Python, .*: fix the template"):
            template(text).check()
    template("{{ messages | map(attribute='role') | list }}").check()


def test_names_of_days_are_english_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by what is set while a template is rendered: few machines have another locale."""
    asked = []
    real = locale.setlocale

    def setlocale(category: int, name: str | None = None) -> str:
        asked.append(name)
        return "de_DE.UTF-8" if name is None else real(category, "C")

    monkeypatch.setattr(locale, "setlocale", setlocale)
    template(LLAMA).render(MESSAGES)
    assert asked == [None, "C", "de_DE.UTF-8"]


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_time_zones_do_not_matter(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        assert template(LLAMA).render(MESSAGES) == "Today Date: 09 Mar 2024\n1 + 1?"
    time.tzset()


def test_a_template_that_fails_leaves_the_clock_running() -> None:
    failing = template("{{ strftime_now('%Y') }}{{ raise_exception('no') }}")
    with pytest.raises(UserError, match=r"cannot render a user message \(no\)"):
        failing.render(MESSAGES)
    year = "{{ strftime_now('%Y') }}"
    rendered = failing.tokenizer.apply_chat_template(MESSAGES, tokenize=False, chat_template=year)
    assert rendered == str(datetime.now().year)
