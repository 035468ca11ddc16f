"""Dialogues of completions."""

from grpo_eqx.data.acted import Acted, ToolCounts, as_text

ASKED = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": "x"}}}
DIALOGUE = [
    {"role": "assistant", "content": "Let me see.\n", "tool_calls": [ASKED]},
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "", "tool_calls": [ASKED]},
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "Sure?"},
]


def test_a_dialogue_is_text_to_be_read() -> None:
    assert as_text(DIALOGUE).splitlines() == [
        "Let me see.", "[call multiply(a=6, b='x')]", "[multiply: 42]",
        "[call multiply(a=6, b='x')]", "[multiply: 42]", "It is 42.", "[user: Sure?]",
    ]  # fmt: skip


def test_parts_are_chosen_and_joined() -> None:
    lost = ToolCounts(1, 1, 2, 1, 1, 0.5)
    messages = [[{"n": i}] for i in range(3)]
    acted = Acted(
        ["x", "y", "z"], messages, ["a", "b", None], [ToolCounts(), lost, ToolCounts()], 2.0
    )
    part = acted.of([2, 0])
    assert (part.messages, part.environments) == ([[{"n": 2}], [{"n": 0}]], [None, "a"])
    assert (part.prompts, part.lost, part.waited) == (["z", "x"], [False, False], 0.0)
    both = acted.joined(acted)
    assert both.counts == ToolCounts(6, 2, 4, 2, 2, 1.0)
    assert both.waited == 4.0
    assert both.environments == ["a", "b", None, "a", "b", None]
