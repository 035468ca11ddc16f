"""Dialogues: calls are run and answered, within limits."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx import UserError
from grpo_eqx.common.errors import RunError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments import calls as calls_module
from grpo_eqx.environments import dialogues as dialogues_module
from grpo_eqx.environments.calls import Calls
from grpo_eqx.environments.chat_format import ChatFormat
from grpo_eqx.environments.dialogues import Dialogue, Dialogues, ToolLimits, is_ids
from grpo_eqx.environments.environment import Environment, Step
from grpo_eqx.environments.pool import Environments
from grpo_eqx.environments.starts import started
from grpo_eqx.environments.tools import make_tools
from tests.environments.templates import HERMES, tokenizer_with

CHAT = ChatFormat(tokenizer_with(HERMES))
USER = {"role": "user", "content": "What is 6 times 7?"}


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: A number.
        b: Another.
    """
    return a * b


def words(number: int) -> str:
    """Returns many words.

    Args:
        number: How many.
    """
    return " ".join(map(str, range(number)))


def fail(text: str) -> str:
    """Fails.

    Args:
        text: With what.
    """
    raise ValueError(text)


TOOLS = {tool.name: tool for tool in make_tools([multiply, words, fail])}


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def ids_of(text: str) -> list[int]:
    ids: list[int] = CHAT.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.fixture
def calls() -> Iterator[Calls]:
    runner = Calls(timeout=20.0)
    yield runner
    runner.close()


@pytest.fixture
def dialogues(calls: Calls) -> Callable[..., Dialogues]:
    def make(number: int = 1, tools: Mapping[str, Any] = TOOLS, **limits: Any) -> Dialogues:
        each = {n: Dialogue(tools) for n in range(number)}
        return Dialogues(each, (), CHAT, calls, ToolLimits(**limits))

    return make


def begun() -> Trajectory:
    return Trajectory(ids_of(CHAT.tokenizer.template.render([USER])), Address(0, 0, 0))


def drawn(trajectory: Trajectory, text: str) -> Trajectory:
    ids = ids_of(text)
    return trajectory.extended(ids, np.zeros(len(ids)))


def speak(dialogues: Dialogues, *texts: str) -> tuple[Trajectory, list[list[int] | None]]:
    """The model writes these turns; returns the trajectory and the replies to each."""
    trajectory, replies = begun(), list[list[int] | None]()
    for text in texts:
        trajectory = drawn(trajectory, text + "<|im_end|>")
        dialogues.take(0, trajectory)
        ((number, reply),) = dialogues.replies(wait=True)
        assert number == 0
        replies.append(None if reply is None else list(reply))
        if reply is not None:
            trajectory = trajectory.extended(reply)
    return trajectory, replies


def test_each_kind_of_failure_is_said_once(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(how: str) -> str:
        """Fails.

        Args:
            how: The kind.
        """
        raise {"os": OSError, "key": KeyError}[how](f"number {len(said)}")

    said = list[str]()
    dialogue = Dialogue({"fail": make_tools([fail])[0]})
    made = Dialogues({0: dialogue}, (), CHAT, calls, ToolLimits())
    speak(made, *(call("fail", how=how) for how in ("os", "os", "key", "os")), call("fail"))
    said += [line for line in capfd.readouterr().err.splitlines() if "warning: tool fail" in line]
    assert len(said) == 2
    assert "raised OSError: number 0 (" in said[0]
    assert "raised KeyError: " in said[1]


def test_calls_are_answered_until_there_are_none(dialogues: Callable[..., Dialogues]) -> None:
    made = dialogues()
    asked = "Let me see." + call("multiply", a=6, b=7)
    trajectory, (reply, last) = speak(made, asked, "It is 42.")
    assert reply is not None
    assert last is None
    dialogue = made.dialogues[0]
    dialogue.finish(trajectory, CHAT)
    functions = [{"name": "multiply", "arguments": {"a": 6, "b": 7}}]
    assert dialogue.messages == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": each} for each in functions],
        },
        {"role": "tool", "name": "multiply", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    rendered = CHAT.tokenizer.template.render([USER, *dialogue.messages], opens=False)
    read = [*trajectory.prompt_ids, *trajectory.ids.tolist()]
    assert CHAT.tokenizer.tokenizer.decode(read) == rendered.removesuffix("\n")
    assert (dialogue.num_turns, dialogue.num_calls, dialogue.num_failures) == (1, 1, 0)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("fail", text="no such page"), "{'error': 'no such page'}"),
        (call("divide", a=1), "{'error': 'Tool divide not found.'}"),
        (call("multiply", a=1), "multiply() missing a required argument: 'b'"),
        (call("multiply", a=1, b=2, c=3), "multiply() got an unexpected keyword argument 'c'"),
        (call("multiply", a=[1], b="x"), "can't multiply sequence by non-int"),
    ],
)
def test_what_a_call_raises_is_its_answer(
    dialogues: Callable[..., Dialogues], asked: str, answer: str
) -> None:
    made = dialogues()
    speak(made, asked)
    dialogue = made.dialogues[0]
    assert answer in dialogue.messages[-1]["content"]
    assert dialogue.num_failures == 1


def test_a_failure_can_stop_the_run(dialogues: Callable[..., Dialogues]) -> None:
    with pytest.raises(
        RunError,
        match=r"tool fail raised ValueError: no such page \(.*, line \d+\): fix it, or set",
    ):
        speak(dialogues(failures="stop"), call("fail", text="no such page"))


def test_mistakes_of_the_model_do_not_stop_it(dialogues: Callable[..., Dialogues]) -> None:
    made = dialogues(failures="stop")
    speak(
        made,
        call("divide", a=1)
        + call("multiply", a=1)
        + '<tool_call>\n{"name": "words", "arguments": [3]}\n</tool_call>',
    )
    assert made.dialogues[0].num_failures == 3


def test_a_result_without_a_text_is_a_failure(dialogues: Callable[..., Dialogues]) -> None:
    def power(exponent: int) -> int:
        """Computes a power of ten.

        Args:
            exponent: The exponent.
        """
        return 10**exponent

    tools = {tool.name: tool for tool in make_tools([power])}
    made = dialogues(1, tools)
    speak(made, call("power", exponent=5000))
    assert "Exceeds the limit" in made.dialogues[0].messages[-1]["content"]
    assert made.dialogues[0].num_failures == 1


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ([{"type": "text"}], "[{'type': 'text'}]"),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
    ],
)
def test_blocks_of_text_are_answered_as_their_text(
    dialogues: Callable[..., Dialogues], result: list[Any], answer: str
) -> None:
    def look() -> list:
        """Looks."""
        return result

    made = dialogues(1, {tool.name: tool for tool in make_tools([look])})
    speak(made, call("look"))
    assert made.dialogues[0].messages[-1]["content"] == answer


def test_calls_of_a_turn_are_answered_in_their_order(dialogues: Callable[..., Dialogues]) -> None:
    made = dialogues()
    speak(made, call("words", number=2) + call("multiply", a=2, b=3) + call("words", number=1))
    assert [m["content"] for m in made.dialogues[0].messages[1:]] == ["0 1", "6", "0"]


def test_dialogues_do_not_wait_for_each_other(dialogues: Callable[..., Dialogues]) -> None:
    """The first call ends only after the second one was answered."""
    released = threading.Event()

    def wait(seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long at most.
        """
        return str(released.wait(seconds))

    tools = {tool.name: tool for tool in make_tools([wait, multiply])}
    made = dialogues(2, tools)
    waiting = drawn(begun(), call("wait", seconds=20.0) + "<|im_end|>")
    quick = drawn(begun(), call("multiply", a=2, b=3) + "<|im_end|>")
    made.take(0, waiting)
    made.take(1, quick)
    ((number, _),) = made.replies(wait=True)
    assert number == 1
    assert list(made.replies(wait=False)) == []
    released.set()
    ((number, _),) = made.replies(wait=True)
    assert number == 0
    assert made.dialogues[0].messages[-1]["content"] == "True"


def test_turns_end_at_their_limit(dialogues: Callable[..., Dialogues]) -> None:
    made = dialogues(max_iterations=1)
    again = call("multiply", a=1, b=1)
    _, replies = speak(made, again, again)
    assert [reply is None for reply in replies] == [False, True]
    assert made.dialogues[0].num_turns == 1


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_a_long_answer_is_cut(dialogues: Callable[..., Dialogues], side: str) -> None:
    made = dialogues(max_response_length=20, truncate_side=side)
    speak(made, call("words", number=300))
    content = made.dialogues[0].messages[-1]["content"]
    assert len(ids_of(content)) <= 20 + 3
    assert content.startswith("0 1") == (side != "right")
    assert content.endswith("299") == (side != "left")


def test_answers_that_did_not_fit_are_taken_back(dialogues: Callable[..., Dialogues]) -> None:
    made = dialogues()
    trajectory = drawn(begun(), call("words", number=9) + "<|im_end|>")
    made.take(0, trajectory)
    made.replies(wait=True)
    dialogue = made.dialogues[0]
    dialogue.finish(trajectory, CHAT)
    assert [message["role"] for message in dialogue.messages] == ["assistant"]


def test_a_turn_that_was_cut_is_a_message(dialogues: Callable[..., Dialogues]) -> None:
    made = dialogues()
    trajectory, _ = speak(made, call("multiply", a=2, b=3))
    trajectory = drawn(trajectory, "It is")
    made.dialogues[0].finish(trajectory, CHAT)
    assert made.dialogues[0].messages[-1] == {"role": "assistant", "content": "It is"}


class Echo(Environment):
    """Says what it was told, three times."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def reset(self, **row: Any) -> None: ...

    def step(self, text: str) -> Step:
        result = self.steps.pop(0)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, Step) and isinstance(result.observation, str):
            return result._replace(observation=f"{text}? {result.observation}")
        return result  # type: ignore[no-any-return]


def test_an_environment_takes_turns_until_it_is_done(calls: Calls) -> None:
    """Rewards may be scalars of array libraries."""
    rewards: list[Any] = [np.array(0.25), jnp.float32(0.25), 1.0]
    first, second, last = rewards
    environment = Echo(Step("Lower.", first), Step("Higher.", second), Step(None, last, done=True))
    chat = ChatFormat(tokenizer_with(HERMES), has_tools=False, has_users=True)
    dialogue = Dialogue(environment=environment, takes_turns=True)
    made = Dialogues({0: dialogue}, (), chat, calls, ToolLimits())
    trajectory, replies = speak(made, "5", "3", "4")
    assert [reply is None for reply in replies] == [False, False, True]
    dialogue.finish(trajectory, chat)
    assert [(m["role"], m["content"]) for m in dialogue.messages] == [
        ("assistant", "5"), ("user", "5? Lower."), ("assistant", "3"), ("user", "3? Higher."),
        ("assistant", "4"),
    ]  # fmt: skip
    assert environment.get_reward() == 1.5
    rendered = chat.tokenizer.template.render([USER, *dialogue.messages], opens=False)
    read = [*trajectory.prompt_ids, *trajectory.ids.tolist()]
    assert chat.tokenizer.tokenizer.decode(read) == rendered.removesuffix("\n")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            ValueError("no such move"),
            r"step of Echo raised ValueError: no such move \(.*, line \d+\)",
        ),
        (3, r"returned 3: return a Step, as in Step\(observation, reward, done\)"),
        (Step(None, 1.0), "a Step that is not done, with the observation None: give the text"),
        (Step(b"bytes", 1.0), "with the observation b'bytes'"),  # type: ignore[arg-type]
        (Step("text", float("nan")), "with the reward nan: give a finite number"),
        (Step("text", None), "with the reward None"),  # type: ignore[arg-type]
    ],
)
def test_a_step_that_fails_loses_the_completion(calls: Calls, result: Any, said: str) -> None:
    chat = ChatFormat(tokenizer_with(HERMES), has_tools=False, has_users=True)
    dialogue = Dialogue(environment=Echo(result), takes_turns=True)
    _, (reply,) = speak(Dialogues({0: dialogue}, (), chat, calls, ToolLimits()), "5")
    assert reply is None
    assert dialogue.is_lost
    assert dialogue.counts.failures == dialogue.counts.lost == 1
    dialogue = Dialogue(environment=Echo(result), takes_turns=True)
    with pytest.raises(RunError, match=said):
        speak(Dialogues({0: dialogue}, (), chat, calls, ToolLimits(failures="stop")), "5")


def test_an_environment_in_which_a_call_may_still_run_is_left_alone() -> None:
    released = threading.Event()

    class Slow:
        def wait(self) -> None:
            """Waits."""
            released.wait(20.0)

        def answer(self) -> int:
            """Answers."""
            return 42

    slow = Slow()
    tools = {tool.name: tool for tool in make_tools([slow.wait, slow.answer])}
    calls = Calls(timeout=0.05)
    dialogue = Dialogue(tools, slow)
    made = Dialogues({0: dialogue}, (), CHAT, calls, ToolLimits(timeout=0.05))
    _, replies = speak(made, call("answer"), call("answer") + call("wait") + call("answer"))
    released.set()
    calls.close()
    assert [reply is None for reply in replies] == [False, True]
    assert dialogue.is_lost
    assert dialogue.num_failures == 2
    assert dialogue.messages[-1]["role"] == "assistant"  # nothing was read of it


def test_a_turn_without_its_end_token_gets_it(calls: Calls) -> None:
    """As one that a stop string ended."""
    dialogue = Dialogue(TOOLS)
    made = Dialogues({0: dialogue}, (), CHAT, calls, ToolLimits())
    trajectory = drawn(begun(), call("multiply", a=6, b=7))
    made.take(0, trajectory)
    ((_, reply),) = made.replies(wait=True)
    assert reply is not None
    read = CHAT.tokenizer.tokenizer.decode([*trajectory.prompt_ids, *trajectory.ids, *reply])
    rendered = CHAT.tokenizer.template.render([USER, *dialogue.messages])
    assert read == rendered


def test_a_blocked_event_loop_is_said(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "GRACE", 0.2)
    monkeypatch.setattr(dialogues_module, "GRACE", 0.2)
    released = threading.Event()

    async def block() -> None:
        """Blocks."""
        released.wait(20.0)

    tools = {tool.name: tool for tool in make_tools([block])}
    made = Dialogues({0: Dialogue(tools)}, (), CHAT, calls, ToolLimits())
    with pytest.raises(RunError, match="blocks its event loop, so that no call can go on: await"):
        speak(made, call("block"))
    released.set()


@pytest.mark.parametrize("name", ["\\ud800", "multiply"])
def test_whatever_the_model_writes_a_run_goes_on(
    dialogues: Callable[..., Dialogues], name: str
) -> None:
    made = dialogues()
    asked = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": "\\ud800", "b": 2}}}}\n</tool_call>'
    )
    _, (reply,) = speak(made, asked)
    assert (reply is None) == (name != "multiply")


def test_tools_get_arguments_of_their_own(dialogues: Callable[..., Dialogues]) -> None:
    def sort(numbers: list[int]) -> list[int]:
        """Sorts.

        Args:
            numbers: What.
        """
        numbers.sort()
        return numbers

    made = dialogues(1, {tool.name: tool for tool in make_tools([sort])})
    speak(made, call("sort", numbers=[2, 1]))
    first, answer = made.dialogues[0].messages
    assert first["tool_calls"][0]["function"]["arguments"] == {"numbers": [2, 1]}
    assert answer["content"] == "[1, 2]"


def test_what_nothing_answers_ends_at_once(calls: Calls) -> None:
    made = Dialogues({}, [0], CHAT, calls, ToolLimits())
    _, replies = speak(made, call("multiply", a=1, b=2))
    assert replies == [None]


class Copier(Environment):
    """Reads and writes tokens."""

    def reset(self, **row: Any) -> list[int]:
        return [5, 6, 7]

    def step(self, ids: list[int]) -> Step:  # type: ignore[override]
        return Step(np.array([*ids, *ids])) if len(ids) < 6 else Step(done=True)


def test_an_environment_can_read_and_write_tokens(calls: Calls) -> None:
    chat = ChatFormat(tokenizer_with(HERMES), has_tools=False, has_users=True)
    dialogue = Dialogue(environment=Copier(), takes_turns=True)
    made = Dialogues({0: dialogue}, (), chat, calls, ToolLimits(max_response_length=3))
    trajectory, (reply,) = speak(made, "5")
    turn = trajectory.ids[: len(trajectory.ids) - len(reply)].tolist()
    assert turn[-1] in chat.tokenizer.eos_ids
    assert reply == [*turn, *turn][:1] + [*turn, *turn][-2:]
    assert dialogue.num_read == len(trajectory.ids)
    assert set(dialogue.messages[-1]) == {"role", "content"}


def test_tokens_that_reset_returns_are_the_prompt() -> None:
    environments, tokenizer = Environments(factory=Copier), tokenizer_with(HERMES)
    problems = {0: Prompt("2 + 2?", {})}
    start = started(environments, [[0]], problems, tokenizer, max_prompt_length=3)[0]
    assert start.ids == [5, 6, 7]
    assert start.content == tokenizer.tokenizer.decode([5, 6, 7])
    with pytest.raises(
        UserError, match="made a prompt of 3 tokens, and max_prompt_length is 2: raise"
    ):
        started(environments, [[0]], problems, tokenizer, max_prompt_length=2)
    environments.close()


@pytest.mark.parametrize("value", [[], [-1], [10**9], [0.5], "5", b"5", None, [[1]]])
def test_what_are_no_tokens(value: Any) -> None:
    assert not is_ids(value, 448)
