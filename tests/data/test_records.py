"""Rows as people have them become prompts."""

import pytest

from grpo_eqx import UserError
from grpo_eqx.data.records import Records


def test_an_assistant_that_calls_tools_need_not_say_anything() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    assert Records.of([("row 1", {"prompt": talk})], "rows")[0].content == talk


def test_rows_need_no_prompt_where_an_environment_makes_it() -> None:
    rows = [(f"row {i}", {"environment": "game", "level": i}) for i in (1, 2)]
    with pytest.raises(UserError, match="row 1 has no column question or prompt"):
        Records.of(rows, "rows")
    made = Records.of(rows, "rows", needs_prompt=False)[1]
    assert (made.content, made.columns) == ("", {"environment": "game", "level": 2})
    with pytest.raises(UserError, match="row 1: prompt is '': it must be non-empty text"):
        Records.of([("row 1", {"prompt": ""})], "rows", needs_prompt=False)
