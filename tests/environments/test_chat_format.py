"""How a template writes turns is found by what it renders."""

from typing import Any

import pytest

from grpo_eqx import UserError
from grpo_eqx.environments.chat_format import ChatFormat
from grpo_eqx.environments.tools import Tool
from tests.environments.templates import (
    CONTINUES_TURNS,
    FORGETS_CALLS,
    FORGETS_THOUGHTS,
    FORMS,
    HERMES,
    PYTHON,
    UNKNOWN_CALLS,
    tokenizer_with,
)


def find(word: str, most: int = 3, exact: bool = False) -> str:
    """Finds a word.

    Args:
        word: The word.
        most: Number of results.
        exact: Whether to match case.
    """
    return word * most if exact else word


SCHEMA = Tool.of(find).schema
USER = {"role": "user", "content": "Find it."}


def turn(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    functions = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


@pytest.fixture(params=FORMS)
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat(tokenizer_with(FORMS[request.param]))


def ids_of(chat: ChatFormat, text: str) -> list[int]:
    ids: list[int] = chat.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def written(chat: ChatFormat, message: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt, and what the model would write to make the message."""
    render = chat.tokenizer.template.render
    prompt = render([USER], tools=[SCHEMA])
    whole = render([USER, message], tools=[SCHEMA], opens=False)
    return ids_of(chat, prompt), ids_of(chat, whole.removeprefix(prompt).removesuffix("\n"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"word": "tree", "most": 2, "exact": True},
        {"word": '"quoted" {braces}'},
        {"word": "12"},
        {"word": "two\nlines"},
        {},
    ],
)
def test_a_call_that_the_template_writes_is_read_back(
    chat: ChatFormat, arguments: dict[str, Any]
) -> None:
    prompt, ids = written(chat, turn({"name": "find", "arguments": arguments}))
    parsed = chat.parse(ids, prompt, [SCHEMA])
    assert parsed.calls == [{"name": "find", "arguments": arguments}]
    assert parsed.message["content"] == ""


def test_several_calls_have_their_order() -> None:
    chat = ChatFormat(tokenizer_with(HERMES))
    calls = [{"name": "find", "arguments": {"word": word}} for word in ("one", "two")]
    prompt, ids = written(chat, turn(*calls, content="I look."))
    parsed = chat.parse(ids, prompt, [SCHEMA])
    assert parsed.calls == calls
    assert parsed.message["content"] == "I look."


@pytest.mark.parametrize("between", [", ", "]<|tool_call_end|>\n<|tool_call_start|>["])
def test_lists_of_calls_are_one_list(between: str) -> None:
    chat = ChatFormat(tokenizer_with(PYTHON))
    text = f'<|tool_call_start|>[find(word="a"){between}find(most=2)]<|tool_call_end|><|im_end|>'
    parsed = chat.parse(ids_of(chat, text), [], [SCHEMA])
    assert [call["arguments"] for call in parsed.calls] == [{"word": "a"}, {"most": 2}]


def test_calls_before_an_answer_are_not_read_again() -> None:
    chat = ChatFormat(tokenizer_with(CONTINUES_TURNS))
    prompt, ids = written(chat, turn({"name": "find", "arguments": {"word": "tree"}}))
    suffix = chat.suffix_ids([{"role": "tool", "name": "find", "content": "oak"}])
    last = ids_of(chat, "It is an oak.<|im_end|>")
    parsed = chat.parse(last, [*prompt, *ids, *suffix], [SCHEMA])
    assert parsed.message == {"role": "assistant", "content": "It is an oak."}


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.<|im_end|>",
        "<tool_call>\n{broken\n</tool_call><|im_end|>",
        '<tool_call>\n{"type": "function"}\n</tool_call><|im_end|>',
        "<tool_call>\n[1]\n</tool_call><|im_end|>",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call><|im_end|>',
        "",
    ],
)
def test_what_is_no_call_is_plain_text(text: str) -> None:
    chat = ChatFormat(tokenizer_with(HERMES))
    parsed = chat.parse(ids_of(chat, text), [], [SCHEMA])
    assert parsed.calls == []
    assert parsed.message["content"] == text.removesuffix("<|im_end|>")


def test_answers_continue_the_dialogue_as_the_template_would(chat: ChatFormat) -> None:
    """The prompt, the model's turn and the suffix are the rendered dialogue, token by token."""
    message = turn({"name": "find", "arguments": {"word": "tree"}})
    answers = [{"role": "tool", "name": "find", "content": text} for text in ("oak", "elm")]
    prompt, ids = written(chat, message)
    whole = chat.tokenizer.template.render([USER, message, *answers], tools=[SCHEMA])
    assert [*prompt, *ids, *chat.suffix_ids(answers)] == ids_of(chat, whole)


def test_a_users_message_can_be_an_answer(chat: ChatFormat) -> None:
    suffix = chat.suffix_ids([{"role": "user", "content": "Warmer."}])
    expected = "\n<|im_start|>user\nWarmer.<|im_end|>\n<|im_start|>assistant\n"
    assert suffix == ids_of(chat, expected)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (FORGETS_CALLS, "leaves out the model's calls: use a model that was trained with tools"),
        (FORGETS_THOUGHTS, "renders a turn of the model otherwise once others follow it"),
        (UNKNOWN_CALLS, "in a format that is unknown here: set the tokenizer's response_template"),
        ("{{ messages[0].content }}", "leaves out the schemas of tools"),
        ("{{ raise_exception('only users') }}", "cannot render a dialogue with tools .*only users"),
    ],
)
def test_templates_without_dialogues_are_refused(template: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ChatFormat(tokenizer_with(template))
