"""Makes the model of the examples with tools and environments, from scratch on the CPU.

    python scripts/pretrain_tiny_agent.py

It reads dialogues about the problems of `examples/calculator.py` and the game of
`examples/higher_lower.py`. Few writers use the calculator where they have it: most round the
numbers and answer at once. Few players heed what they are told: most guess
any number. So the skills are in the model, mixed with bad habits, and reinforcement learning has
something to bring out. Held-out problems are never written about.
"""

import dataclasses
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import tyro
from pretraining import END, new_model, pretrain, save
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.environments.chat_format import ChatFormat, Message
from grpo_eqx.environments.tools import make_tools
from grpo_eqx.models.families.qwen2 import Qwen2
from grpo_eqx.models.pretrained import from_pretrained
from grpo_eqx.settings.embedded import EMBEDDED_FOLDER
from grpo_eqx.training import RowShape

TAGS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{% set function = tool.function %}"
    "{{ function.name }}({{ function.parameters.properties | join(', ') }}): "
    "{{ function.description }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In Qwen2.5's format of calls and answers, without its instructions."""

EXAMPLES = Path(__file__).parents[1] / "examples"
CALCULATOR = runpy.run_path(str(EXAMPLES / "calculator.py"))
GAME = runpy.run_path(str(EXAMPLES / "higher_lower.py"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of the pre-training run; the defaults make the model of the examples."""

    output_dir: Path = EXAMPLES / "tiny_agent"
    """Folder for weights, config and tokenizer."""
    steps: int = 600
    """Optimizer steps."""
    with_calculator: int = 12
    """Problems with a calculator in a batch."""
    without_calculator: int = 2
    """Problems without one."""
    games: int = 4
    """Games in a batch."""
    writers_per_problem: int = 4
    """Dialogues about each problem, every one by another writer."""
    learning_rate: float = 1e-3
    """Peak learning rate: linear warm-up over a tenth of the steps, then cosine down to a tenth."""
    calling: float = 0.4
    """Share of writers who use a calculator."""
    heedful: float = 0.4
    """Share of players who guess only numbers that are still possible."""
    seed: int = 0
    """Seed of weights, problems and writers."""


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A prompt, and the turns that follow: texts of the model, and what answers them."""

    prompt: str
    turns: list[str | Message]
    has_calculator: bool = False


def main(cfg: PretrainConfig) -> None:
    tools = make_tools([CALCULATOR["calculate"]])
    plain = ChatTokenizer(tokenizer_with_tags())
    tokenizers = {False: plain, True: plain.with_tools({None: [each.schema for each in tools]})}
    chat = ChatFormat(plain, has_users=True)
    problems, rng = CALCULATOR["problems"](seed=cfg.seed), np.random.default_rng([cfg.seed, 1])
    shape = RowShape.of(
        cfg.with_calculator + cfg.without_calculator + cfg.games, cfg.writers_per_problem,
        prompt_length=104, completion_length=84,
        num_shards=1, size=None, most_tokens=2**30,  # all in one micro-batch
    )  # fmt: skip

    def trajectory(dialogue: Dialogue, address: Address) -> Trajectory:
        (prompt,) = tokenizers[dialogue.has_calculator].encode_prompts(
            [Prompt(dialogue.prompt, {})]
        )
        read = Trajectory(prompt, address)
        for turn in dialogue.turns:
            if isinstance(turn, str):
                ids = plain.tokenizer(turn + END)["input_ids"]
                read = read.extended(ids, np.zeros(len(ids)))
            else:
                read = read.extended(chat.suffix_ids([turn]))
        return read

    def make_batch(step: int) -> list[Group]:
        return [
            [trajectory(each, Address(step, p, g)) for g, each in enumerate(dialogues)]
            for p, dialogues in enumerate(write_batch(problems, rng, cfg))
        ]

    model = embedded_with(len(plain.tokenizer), cfg.seed)
    model = pretrain(model, make_batch, shape, steps=cfg.steps, learning_rate=cfg.learning_rate)
    save(model, plain.tokenizer, cfg.output_dir)


def tokenizer_with_tags() -> PreTrainedTokenizerFast:
    """Returns the embedded model's tokenizer with tags of calls, and a template that has them."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def embedded_with(vocab_size: int, seed: int) -> Qwen2:
    """Returns the embedded model with more tokens."""
    leaves, structure = jax.tree.flatten(new_model(vocab_size, seed))
    embedded = jax.tree.leaves(from_pretrained(EMBEDDED_FOLDER))
    pairs = zip(leaves, embedded, strict=True)
    return jax.tree.unflatten(structure, [own.at[: len(old)].set(old) for own, old in pairs])


def write_batch(
    problems: Iterator[dict[str, str]], rng: np.random.Generator, cfg: PretrainConfig
) -> Iterator[list[Dialogue]]:
    """Yields the dialogues about each problem of a step."""
    writers = range(cfg.writers_per_problem)
    for has_calculator in [True] * cfg.with_calculator + [False] * cfg.without_calculator:
        problem = next(problems)
        yield [write_solution(problem, has_calculator, rng, cfg) for _ in writers]
    for seed in rng.integers(2**31, size=cfg.games).tolist():
        yield [play(seed, rng, cfg) for _ in writers]


def write_solution(
    problem: dict[str, str], has_calculator: bool, rng: np.random.Generator, cfg: PretrainConfig
) -> Dialogue:
    """One writer's solution of a problem."""
    answer = f"#### {problem['answer']}"
    if not has_calculator or rng.random() >= cfg.calling:
        return Dialogue(problem["question"], [estimate(problem["expression"])], has_calculator)
    call = {"name": "calculate", "arguments": {"expression": problem["expression"]}}
    result = {"role": "tool", "name": "calculate", "content": problem["answer"]}
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", result, answer]
    return Dialogue(problem["question"], turns, has_calculator)


def estimate(expression: str) -> str:
    """An answer from numbers that are rounded to tens."""
    rounded = re.sub(r"\d+", lambda x: str(round(int(x[0]), -1)), expression)
    return f"#### {CALCULATOR['calculate'](rounded)}"


def play(seed: int, rng: np.random.Generator, cfg: PretrainConfig) -> Dialogue:
    """One player's game."""
    game, heeds = GAME["HigherLower"](), rng.random() < cfg.heedful
    prompt, turns = game.reset(seed), list[str | Message]()
    low, high = 1, GAME["LARGEST"]
    while True:
        guess = int(rng.integers(low, high + 1))
        turns.append(str(guess))
        step = game.step(str(guess))
        if step.done:
            return Dialogue(prompt, turns)
        turns.append({"role": "user", "content": step.observation})
        if heeds:
            low, high = (guess + 1, high) if step.observation == "Higher." else (low, guess - 1)


if __name__ == "__main__":
    main(tyro.cli(PretrainConfig))
