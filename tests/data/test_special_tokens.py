"""Special tokens come once, prompts have no end, and built-in rewards find all tags."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.special_tokens import TAGS
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.rewards import RewardRunner, gsm8k
from grpo_eqx.rollout.rollout import Rollout

SPECIAL = ["<s>", "</s>", "[gMASK]", "<|user|>", "<|assistant|>"]


def chat(
    adds: str = "$A", template: str | None = None, tags: Sequence[str] = (), **options: Any
) -> ChatTokenizer:
    """A tokenizer of bytes that adds tokens to texts, as `<s> $A </s>` does."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *tags])
    ids = [(name, tokenizer.token_to_id(name)) for name in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return ChatTokenizer(fast, **options)


def read(tokenizer: ChatTokenizer, prompt: Prompt) -> str:
    """What the model reads of a prompt."""
    return tokenizer.tokenizer.decode(tokenizer.encode_prompts([prompt])[0])


def text(content: str) -> Prompt:
    return Prompt(content, {}, plain=True)


@pytest.mark.parametrize(
    ("adds", "content", "expected"),
    [
        ("$A", "1 + 1 =", "1 + 1 ="),
        ("<s> $A", "1 + 1 =", "<s>1 + 1 ="),
        ("<s> $A", "<s>1 + 1 =", "<s>1 + 1 ="),
        ("<s> $A", "<s><s>1 + 1 =", "<s>1 + 1 ="),
        ("$A </s>", "1 + 1 =", "1 + 1 ="),
        ("<s> $A </s>", "<s>1 + 1 =", "<s>1 + 1 ="),
        ("[gMASK] <s> $A", "1 + 1 =", "[gMASK]<s>1 + 1 ="),
        ("[gMASK] <s> $A", "[gMASK]<s>1 + 1 =", "[gMASK]<s>1 + 1 ="),
        ("<s> $A </s>", "<s>", "<s>"),
    ],
)
def test_a_text_begins_once_and_does_not_end(adds: str, content: str, expected: str) -> None:
    assert read(chat(adds), text(content)) == expected
    assert read(chat(adds, plain=True), Prompt(content, {})) == expected


def test_what_is_added_is_found_whatever_the_first_text_is() -> None:
    tokenizer = chat("<s> $A </s>")
    encoded = tokenizer.encode_prompts([text("<s>"), text("</s>"), text("1 + 1 =")])
    assert tokenizer.tokenizer.batch_decode(encoded) == ["<s>", "<s></s>", "<s>1 + 1 ="]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "<s> $A </s>"])
def test_a_template_brings_its_own(adds: str) -> None:
    assert read(chat(adds, TEMPLATE), Prompt("1 + 1?", {})) == "<s><|user|>1 + 1?<|assistant|>"
    twice = chat(adds, "{{ bos_token }}{{ messages[0].content }}")
    assert read(twice, Prompt("<s>1 + 1?", {})) == "<s>1 + 1?"


TWICE = "prompts begin with '<s>' twice, with space between: leave it out of the {}"


def notes(tokenizer: ChatTokenizer, *prompts: Prompt) -> list[str]:
    return list(tokenizer.notes_on(prompts, tokenizer.encode_prompts(prompts)))


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "expected"),
    [
        (chat("<s> $A"), text("1 + 1 ="), []),
        (chat("<s> $A", TEMPLATE), Prompt("1 + 1?", {}), []),
        (
            chat("<s> $A"),
            text("<s>1 + 1 ="),
            ["texts begin with '<s>', which is not put before them again"],
        ),
        (chat("<s> $A"), text(" <s>1 + 1 ="), [TWICE.format("texts")]),
        (chat("<s> $A"), text("\n\n<s>1 + 1 ="), [TWICE.format("texts")]),
        (
            chat("<s> $A"),
            text("<s> <s>1 + 1 ="),
            [
                "texts begin with '<s>', which is not put before them again",
                TWICE.format("texts"),
            ],
        ),
        (
            chat("<s> $A", "<s>\n" + TEMPLATE),
            Prompt("1 + 1?", {}),
            [TWICE.format("chat template or the messages")],
        ),
        (chat("<s> $A"), text("1<s> + 1 ="), []),
        (
            chat("<s> $A </s>"),
            text("1 + 1 ="),
            ["the tokenizer appends '</s>' to texts, and prompts go without it"],
        ),
        (
            chat(),
            text("1 + 1 =</s>"),
            [
                "prompts end with '</s>', which ends what the model writes: leave it out of the "
                "texts"
            ],
        ),
        (
            chat(),
            text("1 + 1 =</s> \n"),
            [
                "prompts end with '</s>', which ends what the model writes: leave it out of the "
                "texts"
            ],
        ),
        (chat(), text("1 + 1 =</s> \n2 ="), []),
        (
            chat("$A", "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"),
            Prompt("1 + 1?", {}),
            [
                "prompts end with '</s>', which ends what the model writes: end the chat template "
                "with what begins the assistant's message"
            ],
        ),
        (
            chat("$A", TEMPLATE),
            Prompt("<s><|user|>1 + 1?<|assistant|>", {}),
            [
                "questions contain the special token '<s>', as texts do that a chat template has "
                "rendered: for these, name the column prompt"
            ],
        ),
    ],
)
def test_what_is_not_as_expected_is_said(
    tokenizer: ChatTokenizer, prompt: Prompt, expected: list[str]
) -> None:
    assert notes(tokenizer, prompt) == expected


# Tags: what built-in rewards read.

ASSISTANT = (
    "{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>GENERATION{% endif %}"
)
ALWAYS = "{{ messages[-1].content }}<|assistant|>GENERATION"


def opening(generation: str, template: str = ASSISTANT) -> ChatTokenizer:
    return chat("$A", template.replace("GENERATION", generation))


QUESTION, CONVERSATION = Prompt("1 + 1?", {}), Prompt([{"role": "user", "content": "1 + 1?"}], {})


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "opened"),
    [
        (opening("<think>\n"), QUESTION, "<think>\n"),  # DeepSeek-R1-Distill, Qwen3-Thinking
        (opening("<think>\n"), CONVERSATION, "<think>\n"),
        (opening("<think>", ALWAYS), QUESTION, "<think>"),
        (opening("\n<think>\nOkay, so"), QUESTION, "<think>\nOkay, so"),
        (opening("<think>\n\n</think>\n\n"), QUESTION, ""),  # Qwen3 without thinking
        (opening("<think>\n\n</think>\n<answer>"), QUESTION, "<think>\n\n</think>\n<answer>"),
        (opening(""), QUESTION, ""),
        (opening(""), Prompt("Begin with <think>", {}), ""),
        (opening("<think>\n"), text("1 + 1? Answer: <think>\n"), "<think>\n"),  # as TinyZero
        (opening("<think>\n"), text("1 + 1? Answer: "), ""),
        (opening("<think>\n"), text("Use <think> </think>.\nAnswer:"), ""),
        (
            opening("<think>\n"),
            text("A: <think>\n</think>\n<answer>"),
            "<think>\n</think>\n<answer>",
        ),
    ],
)
def test_what_a_prompt_opens_counts(tokenizer: ChatTokenizer, prompt: Prompt, opened: str) -> None:
    texts = [["some text"]]
    assert tokenizer.with_tags([prompt], [[[1]]], texts) == [[opened + "some text"]]


LAYOUT = "<think>1 + 1 is 2</think>\n<answer>2</answer>"


def completed(tokenizer: ChatTokenizer, written: str) -> Rollout:
    ids = tokenizer.tokenizer(written + "</s>", add_special_tokens=False)["input_ids"]
    return Rollout([QUESTION], [[Trajectory([1], Address(0, 0, 0), np.array(ids))]], tokenizer)


def rewards(tokenizer: ChatTokenizer, prompt: Prompt, written: str) -> dict[str, float]:
    funcs = {"format": gsm8k.format, "tags": gsm8k.tags, "strict": gsm8k.correct_strict}
    prompt = Prompt(prompt.content, {"answer": 2}, prompt.plain)
    rollout = dataclasses.replace(completed(tokenizer, written), prompts=[prompt])
    made = RewardRunner(funcs)([prompt], rollout.texts, rollout.ids, rollout.tagged_texts)
    return dict(zip(made.names, made.each[:, 0, 0].tolist(), strict=True))


ALL = {"format": 1.0, "tags": 1.0, "strict": 1.0}


@pytest.mark.parametrize("prompt", [QUESTION, CONVERSATION])
def test_built_in_rewards_count_what_the_template_opened(prompt: Prompt) -> None:
    rest = LAYOUT.removeprefix("<think>")
    assert rewards(opening("<think>"), prompt, rest) == ALL
    assert rewards(opening(""), prompt, LAYOUT) == ALL
    assert rewards(opening(""), prompt, rest) == {"format": 0, "tags": 0.75, "strict": 1}
    assert rewards(opening("<think>"), prompt, LAYOUT)["tags"] == 0.75  # it wrote another


@pytest.mark.parametrize("special", [TAGS, TAGS[:2], TAGS[2:], ["</think>"]])
def test_built_in_rewards_read_tags_that_are_special_tokens(special: Sequence[str]) -> None:
    tokenizer = chat("$A", TEMPLATE, special)
    assert rewards(tokenizer, QUESTION, LAYOUT) == ALL
    completions = completed(tokenizer, LAYOUT)
    assert completions.tagged_texts == [[LAYOUT]]  # without the end
    plain = LAYOUT
    for tag in special:
        plain = plain.replace(tag, "")
    assert completions.texts == [[plain]]  # as in TRL


def test_a_users_function_gets_what_it_gets_from_trl() -> None:
    seen = []

    def own(completions: list[str], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [0.0]

    tokenizer = chat("$A", TEMPLATE, TAGS)
    completions = completed(tokenizer, LAYOUT)
    tagged = completions.tagged_texts
    RewardRunner({"own": own})([QUESTION], completions.texts, completions.ids, tagged)
    assert seen == ["1 + 1 is 2\n2"]


def test_added_tags_that_are_not_special_are_texts_as_any_other() -> None:
    tokenizer = chat("$A", TEMPLATE)
    tokenizer.tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    completions = completed(tokenizer, LAYOUT)
    assert completions.tagged_texts is completions.texts
    assert completions.texts == [[LAYOUT]]
