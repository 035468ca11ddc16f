"""The command `grpo-eqx train`."""

import dataclasses

from grpo_eqx.cli.flags import RunFlags, start
from grpo_eqx.cli.subcommand import Subcommand
from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.trainer import GRPOTrainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(RunFlags, Subcommand):
    """Train a language model by GRPO, with built-in rewards.

    grpo-eqx train [flags]

    With the word plan in the place of train, the same flags plan the run, but for those that tell
    several processes of each other. On several hosts, start it on all of them. For rewards, data or
    strategies of your own, write a script: see examples/gsm8k.py.
    """

    def run(self, command: tuple[str, ...]) -> int:
        start(self, _train)
        return 0


def _train(cfg: GRPOConfig) -> None:
    result = GRPOTrainer(cfg).fit()
    if is_main():
        steps = len(result.history)
        print(f"{steps} steps in {result.seconds:.0f} s; the run is in {result.output_dir}")
