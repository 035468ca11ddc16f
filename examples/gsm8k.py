"""Trains a language model on grade-school math with GRPO, and shows what it learned.

python examples/gsm8k.py --mesh auto
python examples/gsm8k.py --mesh auto --model Qwen/Qwen2.5-3B-Instruct --data openai/gsm8k
"""

from grpo_eqx import GRPOConfig, GRPOTrainer, cli
from grpo_eqx.distributed import is_main


def main(cfg: GRPOConfig) -> None:
    """Train a language model on grade-school math with GRPO."""
    if cfg == GRPOConfig(mesh=cfg.mesh, seed=cfg.seed, output_dir=cfg.output_dir):
        say(
            "Training the embedded model on the embedded problems; for the real thing: "
            "python examples/gsm8k.py --model Qwen/Qwen2.5-3B-Instruct --data openai/gsm8k"
        )
    trainer = GRPOTrainer(cfg)
    print_accuracy("before", trainer)
    result = trainer.fit()
    print_accuracy("after", trainer)
    say(f"{len(result.history)} steps in {result.seconds:.0f} s; the run is in {result.output_dir}")


def print_accuracy(when: str, trainer: GRPOTrainer) -> None:
    sampled = trainer.evaluate(temperature=1.0).accuracy
    greedy = trainer.evaluate().accuracy
    say(f"accuracy {when}: {sampled:.3f} (sampled at temperature 1; greedy {greedy:.3f})")


def say(text: str) -> None:
    """Prints once, however many hosts the run has."""
    if is_main():
        print(text)


if __name__ == "__main__":
    cli.run(main)
