"""Rows as people have them become prompts."""

from grpo_eqx.data.records import Records


def test_an_assistant_that_calls_tools_need_not_say_anything() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    assert Records.of([("row 1", {"prompt": talk})], "rows")[0].content == talk
