"""Makes the embedded model: trains its tokenizer, then pre-trains it from scratch on the CPU.

    python scripts/pretrain_tiny_qwen2.py

The text is what a web full of homework would be: for each problem several people write an answer.
Careful ones are right, some slip in one line and carry the wrong number on, hasty ones only guess.
So the skill is in the model, mixed with bad habits: it solves about a third of the problems when
it samples, and reinforcement learning has something to bring out. Problems of the held-out split
are never written about.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tyro
from pretraining import END, new_model, pretrain, save, train_tokenizer
from transformers import PreTrainedTokenizerFast

from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.data.word_problems import WordProblem, WordProblems
from grpo_eqx.training import RowShape

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of the pre-training run; the defaults make the model that the package ships."""

    output_dir: Path = Path("grpo_eqx/assets/tiny_qwen2")
    """Folder for weights, config and tokenizer."""
    steps: int = 1400
    """Optimizer steps."""
    problems_per_step: int = 24
    """Problems in a batch."""
    writers_per_problem: int = 4
    """Answers to each problem, every one by another writer."""
    learning_rate: float = 2e-3
    """Peak learning rate: linear warm-up over a tenth of the steps, then cosine down to a tenth."""
    careful: float = 0.5
    """Share of writers who work in lines and are right."""
    slipping: float = 0.3
    """Share of writers who get one line wrong; the rest only guess."""
    seed: int = 0
    """Seed of weights, problems and writers."""


def main(cfg: PretrainConfig) -> None:
    source = WordProblems("train", size=cfg.steps * cfg.problems_per_step, seed=cfg.seed + 1)
    tokenizer = train_tokenizer(texts(source, cfg), CHAT_TEMPLATE, 448)
    shape = RowShape.of(
        cfg.problems_per_step, cfg.writers_per_problem, prompt_length=64, completion_length=40,
        num_shards=1, size=None, most_tokens=2**30,  # all in one micro-batch
    )  # fmt: skip
    rng = np.random.default_rng([cfg.seed, 1])
    model = pretrain(
        new_model(len(tokenizer), cfg.seed),
        functools.partial(make_batch, tokenizer=tokenizer, source=source, rng=rng, cfg=cfg),
        shape,
        steps=cfg.steps,
        learning_rate=cfg.learning_rate,
    )
    save(model, tokenizer, cfg.output_dir)


def texts(source: WordProblems, cfg: PretrainConfig) -> Iterator[str]:
    """Problems with answers, for the tokenizer."""
    rng = np.random.default_rng(cfg.seed)
    for index in range(2000):
        problem = source.problem(index)
        yield f"user\n{problem.question}\nassistant\n{write_answer(problem, rng, cfg)}"


def write_answer(problem: WordProblem, rng: np.random.Generator, cfg: PretrainConfig) -> str:
    """One writer's answer to a problem."""
    mood = rng.random()
    if mood < cfg.careful:
        return problem.solution
    off = int(rng.choice([-20, -10, -3, -2, -1, 1, 2, 3, 10, 20]))
    if mood < cfg.careful + cfg.slipping:
        slips = [0] * len(problem.steps)
        slips[rng.integers(len(slips))] = off
        lines = problem.solve(slips)
        return "\n".join([*lines, f"#### {lines[-1].rsplit('=', 1)[1]}"])
    return f"That is about {problem.answer + off}.\n#### {problem.answer + off}"


def make_batch(
    step: int,
    tokenizer: PreTrainedTokenizerFast,
    source: WordProblems,
    rng: np.random.Generator,
    cfg: PretrainConfig,
) -> list[Group]:
    """Prompts of up to 64 tokens, with answers of up to 40 in place of completions."""
    first = step * cfg.problems_per_step
    problems = [source.problem(first + i) for i in range(cfg.problems_per_step)]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for problem in problems
    ]
    answers = [
        write_answer(problem, rng, cfg) + END
        for problem in problems
        for _ in range(cfg.writers_per_problem)
    ]
    prompt_ids, answer_ids = tokenizer(chats)["input_ids"], tokenizer(answers)["input_ids"]
    written, num_writers = iter(answer_ids), cfg.writers_per_problem
    return [
        [
            Trajectory(prompt, Address(step, p, g)).completed(np.array(next(written), np.int32))
            for g in range(num_writers)
        ]
        for p, prompt in enumerate(prompt_ids)
    ]


if __name__ == "__main__":
    main(tyro.cli(PretrainConfig))
