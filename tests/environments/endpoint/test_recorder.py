"""Rollouts of agents, whose rows and masks are computed by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.recorder import MOST_BRANCHES, Recorder, RecordOptions
from grpo_eqx.environments.endpoint.requests import RequestError, as_message, read_chat
from grpo_eqx.generation.open_session import Drawn, Request
from grpo_eqx.generation.sampling import Sampling
from tests.environments.endpoint.test_tools import CALL, TOOLS
from tests.environments.templates import FORGETS_THOUGHTS, HERMES, tokenizer_with

ADDRESS = Address(7, 3, 2)
QUESTION = {"role": "user", "content": "1 + 2?"}
AGAIN = {"role": "user", "content": "Sure?"}


class Agent:
    """Asks for messages, and is answered what a test says."""

    def __init__(self, template: str = HERMES, threshold: int = 1024, most: int = 500):
        self.chat = ChatFormats(tokenizer_with(template))
        options = RecordOptions(self.chat, Sampling(), 200, most, threshold)
        self.recorder = Recorder(Trajectory([1], ADDRESS), options)
        self.requests: list[Request] = []

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.chat.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def begin(self, messages: Sequence[Any], **fields: Any) -> tuple[Any, list[Any]]:
        body = {"messages": list(messages), **fields}
        wanted = read_chat(body, "m")
        tokenizer = self.chat.tokenizer.with_tools({None: wanted.tools} if wanted.tools else {})
        prompt = Prompt(list(wanted.messages or ()), {})
        turns = self.recorder.begin(wanted, lambda: tokenizer.encode_prompts([prompt]))
        self.requests += [turn.request for turn in turns]
        return wanted, turns

    def end(self, wanted: Any, turn: Any, answer: str | list[int], reason: Any = "stop") -> Any:
        ids = self.ids(answer) if isinstance(answer, str) else answer
        chat = self.chat.of(has_tools=True) if wanted.tools else None
        choice = Choice(0, turn.request.ids, wanted, chat, self.chat.tokenizer)
        logps = -np.arange(1, len(ids) + 1, dtype=np.float32)
        choice.add(Drawn(0, np.array(ids, np.int32), logps, reason))
        turn.end(choice, wanted, as_message(choice.message))
        return choice.message

    def ask(self, messages: Sequence[Any], answer: str | list[int], **fields: Any) -> Any:
        """Returns the message that answers."""
        wanted, (turn,) = self.begin(messages, **fields)
        return self.end(wanted, turn, answer)

    def rows(self) -> list[list[tuple[str, bool]]]:
        """The text of each trajectory, prompt included, in parts that the model wrote or not."""
        made = self.recorder.trajectory(version=4)
        assert made is not None
        rows = []
        for each in made.all_of_sample:
            assert (each.versions == np.where(each.written, 4, 0)).all()
            assert ((each.sampler_logps < 0) == each.written).all()
            parts: list[tuple[list[int], bool]] = [(list(each.prompt_ids), False)]
            for token, written in zip(each.ids.tolist(), each.written.tolist(), strict=True):
                if written != parts[-1][1]:
                    parts.append(([], written))
                parts[-1][0].append(token)
            decode = self.chat.tokenizer.tokenizer.decode
            rows.append([(decode(ids), written) for ids, written in parts])
        return rows


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


OPENS = "<|im_start|>assistant\n"


def test_a_dialogue_goes_on_with_the_tokens_that_were_drawn() -> None:
    """Not with those that its text would be written with."""
    agent = Agent()
    drawn = [
        *(token for letter in "It is 3." for token in agent.ids(letter)),
        *agent.ids("<|im_end|>"),
    ]
    assert drawn != agent.ids("It is 3.<|im_end|>")
    message = agent.ask([QUESTION], drawn)
    agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    assert agent.rows() == [
        [
            (user("1 + 2?") + OPENS, False),
            ("It is 3.<|im_end|>", True),
            ("\n" + user("Sure?") + OPENS, False),
            ("Yes.<|im_end|>", True),
        ]
    ]
    first, second = agent.requests
    assert list(second.ids[: len(first.ids) + len(drawn)]) == [*first.ids, *drawn]
    assert first.address == second.address == ADDRESS
    assert first.start == second.start == len(first.ids)
    assert agent.recorder.counts == (2, 0, 0, 0)
    assert [x["role"] for x in agent.recorder.messages] == ["assistant", "user", "assistant"]


def test_tools_answer_by_the_ids_of_calls() -> None:
    agent = Agent()
    message = agent.ask([QUESTION], CALL, tools=TOOLS)
    (call,) = message["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    agent.ask([QUESTION, message, answer], "It is 3.<|im_end|>", tools=TOOLS)
    ((_, (text, written), (told, is_written), _),) = agent.rows()
    assert (text, written, is_written) == (CALL, True, False)
    assert told == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n" + OPENS
    name = agent.recorder.messages[1]["name"]
    assert name == "add"


def test_an_answer_that_was_cut_is_ended() -> None:
    agent = Agent()
    wanted, (turn,) = agent.begin([QUESTION], max_tokens=2)
    message = agent.end(wanted, turn, agent.ids("It is 3")[:2], "length")
    agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    ((_, (cut, _), (told, _), _),) = agent.rows()
    assert told == "<|im_end|>\n" + user("Sure?") + OPENS
    assert cut == message["content"]


def changed(agent: Agent, answer: str, becomes: str) -> None:
    """Asks again with another last answer than was drawn."""
    message = agent.ask([QUESTION], answer)
    agent.ask([QUESTION, {**message, "content": becomes}, AGAIN], "Yes.<|im_end|>")


def test_a_small_change_of_the_last_answer_is_masked() -> None:
    agent = Agent()
    changed(agent, "It is 3.<|im_end|>", "It is 4!")
    (row,) = agent.rows()
    same = "It is "
    assert row == [
        (user("1 + 2?") + OPENS, False),
        (same, True),
        ("4!<|im_end|>\n" + user("Sure?") + OPENS, False),
        ("Yes.<|im_end|>", True),
    ]
    drifted = len(agent.ids("It is 3.<|im_end|>")) - len(agent.ids(same))
    assert agent.recorder.counts == (2, 0, drifted, 0)


def test_a_larger_one_begins_a_trajectory() -> None:
    """Of which the history is read, and not trained again."""
    agent = Agent(threshold=3)
    changed(agent, "It is 3.<|im_end|>", "No, 4!")
    assert agent.rows() == [
        [(user("1 + 2?") + OPENS, False), ("It is 3.<|im_end|>", True)],
        [
            (user("1 + 2?") + OPENS + "No, 4!<|im_end|>\n" + user("Sure?") + OPENS, False),
            ("Yes.<|im_end|>", True),
        ],
    ]
    made = agent.recorder.trajectory(0)
    assert made is not None
    (fork,) = made.forks
    assert list(fork.prompt_ids) == list(made.prompt_ids)  # which rows hold once
    first, second = agent.requests
    assert first.address == ADDRESS
    assert second.address.step == ADDRESS.step
    assert second.address != ADDRESS
    assert agent.recorder.counts == (2, 1, 0, 0)


def test_a_change_of_what_came_before_begins_a_trajectory() -> None:
    agent = Agent()
    first = agent.ask([QUESTION], "It is 3.<|im_end|>")
    second = agent.ask([QUESTION, first, AGAIN], "Yes.<|im_end|>")
    summary = {"role": "user", "content": "We found that it is 3. Why?"}
    third = agent.ask([summary], "So.<|im_end|>")
    agent.ask([summary, third, AGAIN], "No.<|im_end|>")
    agent.ask([QUESTION, first, AGAIN, second, AGAIN], "Yes!<|im_end|>")  # and the first goes on
    one, two = agent.rows()
    assert [text for text, written in one if written] == [
        "It is 3.<|im_end|>", "Yes.<|im_end|>", "Yes!<|im_end|>"
    ]  # fmt: skip
    assert [text for text, written in two if written] == ["So.<|im_end|>", "No.<|im_end|>"]
    assert two[0] == (user(summary["content"]) + OPENS, False)
    assert agent.recorder.counts == (5, 1, 0, 0)


def test_a_thought_that_the_template_leaves_out_is_a_rewrite() -> None:
    """However short it is: it stays in the loss."""
    agent = Agent(FORGETS_THOUGHTS)
    message = agent.ask([QUESTION], "<think>Hm.</think>It is 3.<|im_end|>")
    agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    assert agent.rows() == [
        [(user("1 + 2?") + OPENS, False), ("<think>Hm.</think>It is 3.<|im_end|>", True)],
        [
            (user("1 + 2?") + OPENS + "It is 3.<|im_end|>\n" + user("Sure?") + OPENS, False),
            ("Yes.<|im_end|>", True),
        ],
    ]


def test_one_request_twice_has_two_answers() -> None:
    """Each with draws of its own, and each may go on."""
    agent = Agent()
    messages = [agent.ask([QUESTION], f"It is {n}.<|im_end|>") for n in (3, 4)]
    for message in messages:
        agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    written = [[text for text, is_written in row if is_written] for row in agent.rows()]
    assert written == [[f"It is {n}.<|im_end|>", "Yes.<|im_end|>"] for n in (3, 4)]
    one, two, one_more, two_more = (request.address for request in agent.requests)
    assert one == one_more == ADDRESS
    assert two == two_more != ADDRESS


def test_several_choices_are_trajectories() -> None:
    agent = Agent()
    wanted, turns = agent.begin([QUESTION], n=3)
    assert len({turn.request.address for turn in turns}) == 3
    for n, turn in enumerate(turns):
        agent.end(wanted, turn, f"It is {n}.<|im_end|>")
    assert len(agent.rows()) == 3


def test_draws_of_forks_do_not_depend_on_the_order_of_requests() -> None:
    def addresses(order: Sequence[int]) -> dict[int, Address]:
        agent = Agent()
        agent.ask([QUESTION], "It is 3.<|im_end|>")
        found = {}
        for n in order:
            _, (turn,) = agent.begin([{"role": "user", "content": f"Part {n}."}])
            found[n] = turn.request.address
        return found

    assert addresses([0, 1, 2]) == addresses([2, 0, 1])


def test_a_client_that_hangs_up_and_asks_again_gets_the_same_draws() -> None:
    agent = Agent()
    _, (turn,) = agent.begin([QUESTION])
    turn.drop()
    message = agent.ask([QUESTION], "It is 3.<|im_end|>")
    _, (turn,) = agent.begin([QUESTION, message, AGAIN])
    turn.drop()
    agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    first, second, third, fourth = ((x.ids, x.address) for x in agent.requests)
    assert first == second
    assert third == fourth
    assert len(agent.rows()) == 1


def test_answers_have_the_room_that_is_left() -> None:
    agent = Agent(most=30)
    answer = "It is 3.<|im_end|>"
    message = agent.ask([QUESTION], answer)
    first = agent.requests[0]
    assert first.max_tokens == 30
    agent.begin([QUESTION, message, AGAIN])[1][0].drop()
    told = len(agent.requests[1].ids) - len(first.ids)
    assert agent.requests[1].max_tokens == 30 - told
    long = {"role": "user", "content": "Sure? " * 30}
    with pytest.raises(RequestError, match="the dialogue after the prompt has") as caught:
        agent.begin([QUESTION, message, long])
    assert caught.value.code == "context_length_exceeded"
    made = agent.recorder.trajectory(0)
    assert made is not None
    assert made.finish_reason == "length"
    assert agent.recorder.counts.refused == 1
    with pytest.raises(RequestError, match="max_prompt_length of the run is 200"):
        Agent().begin([{"role": "user", "content": "Sure? " * 300}])


def test_a_short_thought_that_the_answer_repeats_is_a_rewrite_too() -> None:
    agent = Agent(FORGETS_THOUGHTS)
    message = agent.ask([QUESTION], "<think>3</think>It is 3.<|im_end|>")
    agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    assert agent.recorder.counts.forks == 1


def letters(agent: Agent, text: str) -> list[int]:
    """Tokens of a text, and an end, that the tokenizer would not write."""
    drawn = [token for letter in text for token in agent.ids(letter)]
    assert drawn != agent.ids(text)
    return [*drawn, *agent.ids("<|im_end|>")]


def test_a_change_is_measured_where_it_is_whatever_tokens_came_before() -> None:
    agent = Agent()
    first = agent.ask([QUESTION], letters(agent, "It is 3."))
    second = agent.ask([QUESTION, first, AGAIN], "It is 3, yes.<|im_end|>")
    changed = {**second, "content": "It is 3, no."}
    agent.ask([QUESTION, first, AGAIN, changed, AGAIN], "Oh.<|im_end|>")
    assert agent.recorder.counts.forks == 0
    assert agent.recorder.counts.drifted_tokens > 0
    (row,) = agent.rows()
    assert [text for text, written in row if written] == [
        "It is 3.<|im_end|>", "It is 3, ", "Oh.<|im_end|>"
    ]  # fmt: skip


def test_what_was_asked_in_vain_leaves_nothing_behind() -> None:
    """A request that was dropped, and then others of the same dialogue."""
    agent = Agent()
    first = agent.ask([QUESTION], letters(agent, "It is 3."))
    agent.begin([QUESTION, first, {"role": "user", "content": "Never mind."}])[1][0].drop()
    second = agent.ask([QUESTION, first, AGAIN], letters(agent, "It is 3, yes."))
    agent.ask([QUESTION, first, AGAIN, second, AGAIN], "Oh.<|im_end|>")
    assert agent.recorder.counts == (3, 0, 0, 0)


def test_no_two_dialogues_have_the_same_draws() -> None:
    """Also where one of them is dropped, and asked for again."""
    agent = Agent()
    turns = [agent.begin([QUESTION])[1][0] for _ in range(3)]
    turns[1].drop()
    again = agent.begin([QUESTION])[1][0]
    assert again.request.address == turns[1].request.address
    open_ones = turns[0], turns[2], again
    assert len({turn.request.address for turn in open_ones}) == 3
    turns[0].drop()
    assert agent.begin([QUESTION])[1][0].request.address == ADDRESS


def test_a_continuation_that_the_template_refuses_is_a_mistake_of_the_client() -> None:
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    agent = Agent(alternates)
    message = agent.ask([QUESTION], "It is 3.<|im_end|>")
    with pytest.raises(UserError, match="alternate"):  # which the endpoint answers with 400
        agent.begin([QUESTION, message, AGAIN, AGAIN])
    agent.ask([QUESTION, message, AGAIN], "Yes.<|im_end|>")
    assert len(agent.rows()) == 1


def test_nothing_is_recorded_once_a_run_has_ended() -> None:
    agent = Agent()
    message = agent.ask([QUESTION], "It is 3.<|im_end|>")
    wanted, (turn,) = agent.begin([QUESTION, message, AGAIN])
    agent.recorder.close()
    agent.end(wanted, turn, "Yes.<|im_end|>")
    assert len(agent.rows()[0]) == 2
    with pytest.raises(RequestError, match="has ended"):
        agent.begin([QUESTION])


def test_a_completion_cannot_crowd_out_the_others() -> None:
    agent = Agent()
    turns = [turn for _ in range(2) for turn in agent.begin([QUESTION], n=128)[1]]
    with pytest.raises(RequestError, match="more than 256 answers") as caught:
        agent.begin([QUESTION])
    assert caught.value.status == 429
    for turn in turns:
        turn.drop()
    for n in range(MOST_BRANCHES):
        agent.ask([{"role": "user", "content": f"{n}?"}], "Hm.<|im_end|>")
    with pytest.raises(RequestError, match="at most 1024 dialogues"):
        agent.begin([QUESTION])
