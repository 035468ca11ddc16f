"""Trains a language model on grade-school maths by GRPO, and shows what it learnt.

python examples/gsm8k.py --mesh auto
python examples/gsm8k.py --mesh auto --model Qwen/Qwen2.5-3B-Instruct --data openai/gsm8k
"""

from grpo_eqx import GRPOConfig, GRPOTrainer, cli


def main(cfg: GRPOConfig) -> None:
    """Train a language model on grade-school maths by GRPO."""
    if cfg == GRPOConfig(mesh=cfg.mesh, seed=cfg.seed, output_dir=cfg.output_dir):
        print(
            "Training the embedded model on the embedded problems; for the real thing: "
            "python examples/gsm8k.py --model Qwen/Qwen2.5-3B-Instruct --data openai/gsm8k"
        )
    trainer = GRPOTrainer(cfg)
    print_accuracy("before", trainer)
    result = trainer.fit()
    print_accuracy("after", trainer)
    print(
        f"{len(result.history)} steps in {result.seconds:.0f} s; the run is in {result.output_dir}"
    )


def print_accuracy(when: str, trainer: GRPOTrainer) -> None:
    sampled = trainer.evaluate(temperature=1.0).accuracy
    greedy = trainer.evaluate().accuracy
    print(f"accuracy {when}: {sampled:.3f} (sampled at temperature 1; greedy {greedy:.3f})")


if __name__ == "__main__":
    cli.run(main)
