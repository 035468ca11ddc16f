"""Teaches a small model to use a calculator, and shows what it learned.

python examples/calculator.py
python examples/calculator.py --no-calculator
"""

import dataclasses
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from grpo_eqx import GRPOConfig, GRPOTrainer, cli
from grpo_eqx.distributed import is_main

NAMES = ("Tom", "Mia", "Sam", "Ann", "Leo", "Eva", "Ben", "Ivy")
THINGS = ("apples", "books", "cards", "coins", "shells", "pens", "stamps", "cakes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalculatorConfig(GRPOConfig):
    """Settings of the example."""

    calculator: bool = True
    """Whether the model has the calculator."""
    model: str = str(Path(__file__).parent / "tiny_agent")
    output_dir: Path | None = Path("runs/calculator")
    steps: int = 40
    prompts_per_step: int = 16
    num_generations: int = 8
    learning_rate: float = 2e-4
    max_prompt_length: int = 256
    max_completion_length: int | None = 128


def calculate(expression: str) -> int:
    """Adds, subtracts and multiplies.

    Args:
        expression: Whole numbers with +, - and * between them, such as 12*34+5.
    """
    if re.fullmatch(r"\d+([-+*]\d+)*", expression) is None:
        raise ValueError("write whole numbers with +, - and * between them")
    return int(eval(expression))  # digits and signs alone


def problems(*, heldout: bool = False, seed: int = 0) -> Iterator[dict[str, str]]:
    """Makes word problems that are too hard for mental arithmetic, without end.

    `expression` is what a user of the calculator would ask it.
    """
    rng = random.Random(f"{seed} {heldout}")
    while True:
        a, b, c = (rng.randint(12, 99) for _ in range(3))
        if ((a + b) % 5 == 0) != heldout:  # no problem with the numbers of a held-out one
            continue
        who, thing = rng.choice(NAMES), rng.choice(THINGS)
        then, rest = rng.choice(
            [("", ""), (f" and sells {c}", f"-{c}"), (f" and finds {c} more", f"+{c}")]
        )
        expression = f"{a}*{b}{rest}"
        yield {
            "question": f"{who} buys {a} boxes with {b} {thing} in each{then}. How many {thing} "
            f"does {who} have?",
            "answer": str(calculate(expression)),
            "expression": expression,
        }


def main(cfg: CalculatorConfig) -> None:
    """Teach a small model to use a calculator, with GRPO."""
    trainer = GRPOTrainer(
        cfg,
        tools=[calculate] if cfg.calculator else None,
        train_data=list(islice(problems(), 4096)),
        eval_data=list(islice(problems(heldout=True), 256)),
    )
    before = trainer.evaluate(temperature=1.0).accuracy
    result = trainer.fit()
    after = trainer.evaluate(temperature=1.0).accuracy
    if is_main():
        print(f"accuracy before: {before:.3f}, after: {after:.3f}, in {result.seconds:.0f} s")


if __name__ == "__main__":
    cli.run(main)
