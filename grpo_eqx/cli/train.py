"""The command `grpo-eqx train`."""

import dataclasses

from grpo_eqx.cli.flags import RunFlags, start
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.settings.config import GRPOConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(RunFlags, Subcommand):
    """Train a language model with GRPO and built-in rewards.

    With --eval-data or --eval-problems, the trained model is evaluated on held-out problems; with
    --eval-steps, also while it is trained.
    grpo-eqx plan takes the same flags to plan the run, except those that connect several processes;
    grpo-eqx compile takes all of them to compile its programs beforehand. On several hosts, start
    train on all of them. For your own rewards, data or strategies, write a script: see
    examples/gsm8k.py.
    """

    def run(self, command: tuple[str, ...]) -> int:
        start(self, _train)
        return 0


def evaluates(cfg: GRPOConfig) -> bool:
    """Returns whether the settings ask for evaluations."""
    return (
        cfg.eval_steps is not None
        or cfg.eval_data is not None
        or cfg.eval_problems != GRPOConfig.eval_problems
    )


def _train(cfg: GRPOConfig) -> None:
    from grpo_eqx.distributed.startup import is_main
    from grpo_eqx.trainer import GRPOTrainer

    trainer = GRPOTrainer(cfg)
    result = trainer.fit()
    # With eval_steps, the run has evaluated the trained model, and printed the result.
    wanted = evaluates(cfg) and cfg.eval_steps is None
    evaluation = trainer.evaluate() if wanted and trainer.can_evaluate else None
    if is_main():
        steps = trainer.cfg.steps
        whole = len(result.history) == steps  # false if it began from another run's checkpoint
        count = f"{steps} step{'s' if steps > 1 else ''}"
        done = f"{count} in {result.seconds:.0f} s" if whole else f"{count} done"
        if evaluation is not None:
            print_clean(str(evaluation))
        print_clean(f"{done}; the run is in {result.output_dir}")
