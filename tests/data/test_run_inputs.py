"""A run's inputs: what prompts are, at the start and in `generate()`, and what is said of them."""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.data.load import load_problems
from grpo_eqx.data.prompts import Part, Prompt
from grpo_eqx.data.run_inputs import Inputs, encode_prompts, load_heldout, load_inputs
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.models.pretrained import find_config, model_folder

MOMENT = datetime(2024, 3, 9, 23, 59, 58)
MODEL = find_config("tiny_qwen2")
TOKENIZER = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2")).tokenizer
TEXTS = [{"prompt": "Q: 1 + 1?\nA:", "answer": 2}] * 4
QUESTIONS = [{"question": "1 + 1?", "answer": 2}] * 4
USER = {"role": "user", "content": "1 + 1?"}
CONVERSATIONS = [{"prompt": [USER], "answer": 2}] * 4
BARE = copy.deepcopy(TOKENIZER)
BARE.chat_template = None
RENDERED = TOKENIZER.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)


def inputs_of(
    train: Any, tokenizer: Any = TOKENIZER, heldout: Any | None = None, **settings: Any
) -> tuple[Inputs, GRPOConfig]:
    cfg = GRPOConfig(**settings).resolved()
    heldout = train if heldout is None else heldout
    return load_inputs(cfg, copy.copy(tokenizer), train, heldout, moment=MOMENT), cfg


def generated(train: Any, prompts: Any, tokenizer: Any = TOKENIZER, **settings: Any) -> list[str]:
    """What the model reads of prompts that `generate` is called with."""
    inputs, cfg = inputs_of(train, tokenizer, **settings)
    like = inputs.train.prompts[0]
    return [
        TOKENIZER.decode(ids)
        for ids in encode_prompts(prompts, cfg, inputs.tokenizer, MODEL, like=like)[1]
    ]


@pytest.mark.parametrize(
    ("train", "settings", "expected"),
    [
        (TEXTS, {}, "1 + 1?"),
        (QUESTIONS, {}, RENDERED),
        (CONVERSATIONS, {}, RENDERED),
        (QUESTIONS, {"chat_template": "none"}, "1 + 1?"),
    ],
)
def test_a_text_is_what_the_problems_of_the_run_are(
    train: Any, settings: dict[str, Any], expected: str
) -> None:
    assert generated(train, ["1 + 1?"], **settings) == [expected]


@pytest.mark.parametrize("train", [TEXTS, QUESTIONS, CONVERSATIONS])
def test_all_else_is_what_it_is_in_data(train: Any) -> None:
    prompts: list[Any] = [
        [USER],
        {"question": "1 + 1?"},
        {"prompt": [USER], "level": 1},
        {"prompt": "1 + 1?", "answer": 2},
        Prompt("1 + 1?", {}),
        Prompt([USER], {}),
        Prompt("1 + 1?", {}, plain=True),
    ]
    expected = [RENDERED, RENDERED, RENDERED, "1 + 1?", RENDERED, RENDERED, "1 + 1?"]
    assert generated(train, prompts) == expected
    assert generated(train, (each for each in prompts)) == expected
    assert generated(train, ()) == generated(train, iter([])) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([{"text": "1 + 1?"}], "prompt 1 has no column question or prompt, only text"),
        (["1 + 1?", {"prompt": []}], "prompt 2: prompt is"),
        ([Prompt("", {})], "prompt 1: question is '': it must be non-empty text"),
        ([Prompt([{"role": "user"}], {})], "prompt 1: prompt has the message"),
    ],
)
def test_what_no_data_could_have_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generated(QUESTIONS, prompts)


def test_without_a_template_no_advice_is_refused_in_turn(tmp_path: Path) -> None:
    """Each sentence names a way out that works."""
    assert generated(TEXTS, ["1 + 1?"], BARE) == ["1 + 1?"]
    with pytest.raises(UserError, match=r"has no chat template, as .* of this run .*: pass texts"):
        generated(TEXTS, [[USER]], BARE)
    with pytest.raises(UserError, match="set chat_template to a file with one, or to none"):
        inputs_of(QUESTIONS, BARE)
    assert generated(QUESTIONS, ["1 + 1?"], BARE, chat_template="none") == ["1 + 1?"]
    file = tmp_path / "template.jinja"
    file.write_text(TOKENIZER.chat_template)
    assert generated(QUESTIONS, ["1 + 1?"], BARE, chat_template=str(file)) == [RENDERED]


def test_a_template_may_be_for_the_held_out_problems_alone(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TOKENIZER.chat_template)
    with pytest.raises(UserError, match="set chat_template to a file with one"):
        inputs_of(TEXTS, BARE, heldout=QUESTIONS)
    inputs, _ = inputs_of(TEXTS, BARE, heldout=QUESTIONS, chat_template=str(file))
    assert TOKENIZER.decode(inputs.heldout.tokens[0]) == RENDERED
    with pytest.raises(UserError, match=r"chat_template is .*: it would do nothing"):
        inputs_of(TEXTS, BARE, chat_template=str(file))


def test_a_template_has_variables(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% macro shown(message) %}{{ level }} {{ message.content }}{% endmacro %}"
        "{{ shown(messages[0]) }}{% if think is defined and think is false %} no{% endif %}"
    )
    given: Any
    for given in ({"level": "a 'b' {{", "think": False}, ("level=\"a 'b' {{\"", "think=false")):
        inputs, _ = inputs_of(QUESTIONS, chat_template=str(file), chat_template_kwargs=given)
        assert TOKENIZER.decode(inputs.train.tokens[0]) == "a 'b' {{ 1 + 1? no"
    saved = inputs.tokenizer.tokenizer  # and whoever renders with it can say otherwise
    assert saved.apply_chat_template([USER], tokenize=False, level=3) == "3 1 + 1? no"


@pytest.mark.parametrize(
    ("tokenizer", "given", "said"),
    [
        (
            TOKENIZER,
            ("enable_thinking",),
            "has 'enable_thinking': write NAME=VALUE with a value in",
        ),
        (TOKENIZER, ("enable_thinking=no",), "as in enable_thinking=false"),
        (TOKENIZER, {"a b": 1}, "has 'a b=1'"),
        (TOKENIZER, {"message": None}, "a value in JSON, but null"),
        (TOKENIZER, {"enable_thnking": False}, "has enable_thnking, which the chat template does"),
        (TOKENIZER, {"a": object()}, "has 'a': write NAME=VALUE"),
        (BARE, {"a": 1}, "there is no single chat template: it would do nothing"),
    ],
)
def test_variables_that_cannot_be_are_refused(tokenizer: Any, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        inputs_of(TEXTS, tokenizer, chat_template_kwargs=given)


@pytest.mark.parametrize("template", ["none", "a file"])
def test_an_evaluation_with_the_settings_of_a_run_takes_texts(
    tmp_path: Path, template: str
) -> None:
    """They are not its user's to unset."""
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    file = tmp_path / "a file"
    file.write_text(TOKENIZER.chat_template)
    cfg = GRPOConfig(chat_template="none" if template == "none" else str(file)).resolved()
    problems = load_problems(tmp_path / "texts.jsonl", None)
    _, heldout = load_heldout(cfg, problems, MOMENT)
    assert TOKENIZER.decode(heldout.tokens[0]) == "Q: 1 + 1?\nA:"


DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}"


def test_the_time_is_said_where_prompts_ask_for_it(tmp_path: Path) -> None:
    file = tmp_path / "dated.jinja"
    file.write_text(DATED)
    inputs, _ = inputs_of(QUESTIONS, chat_template=str(file))
    assert TOKENIZER.decode(inputs.train.tokens[0]) == "09 Mar 2024 1 + 1?"
    assert inputs.notes() == [
        "the chat template asks for the time, which is 2024-03-09 23:59:58 in all prompts of this "
        "run"
    ]
    assert generated(QUESTIONS, ["Hi"], chat_template=str(file)) == ["09 Mar 2024 Hi"]
    for train, tokenizer in ((QUESTIONS, TOKENIZER), (TEXTS, BARE)):
        assert inputs_of(train, tokenizer)[0].notes() == []


def test_a_tokenizer_that_is_passed_to_two_runs_has_the_time_of_each() -> None:
    given = ChatTokenizer(copy.copy(TOKENIZER))
    given.tokenizer.chat_template = DATED
    cfg = GRPOConfig().resolved()
    one = load_inputs(cfg, given, QUESTIONS, QUESTIONS, moment=MOMENT)
    other = load_inputs(cfg, given, QUESTIONS, QUESTIONS, moment=datetime(2025, 1, 2))
    prompt = one.train.prompts[0]
    assert one.tokenizer.render(prompt) == "09 Mar 2024 1 + 1?"
    assert other.tokenizer.render(prompt) == "02 Jan 2025 1 + 1?"


@pytest.mark.parametrize(("train", "heldout"), [(0, 2), (2, 0), (0, 0)])
def test_a_source_without_problems_is_named(train: int, heldout: int) -> None:
    sources = {
        name: Part(name=name, source=WordProblems("train"), start=0, stop=count)
        for name, count in (("the first", train), ("the second", heldout))
    }
    empty = "the second" if train else "the first"
    with pytest.raises(UserError, match=f"{empty} has no .*problems: add"):
        inputs_of(sources["the first"], heldout=sources["the second"])


@pytest.mark.parametrize("source", ["", None, 5, "a\0b", "x" * 5000, "no/such/folder"])
def test_a_tokenizer_from_nowhere_is_taken_beside_a_model_that_is_passed(source: Any) -> None:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.name_or_path = source
    cfg = GRPOConfig().resolved()
    inputs = load_inputs(cfg, tokenizer, QUESTIONS, QUESTIONS, model_passed=True, moment=MOMENT)
    assert inputs.tokenizer.eos_ids == (2,)
