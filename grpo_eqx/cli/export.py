"""The command `grpo-eqx export`."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.subcommand import Subcommand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Subcommand):
    """Write a checkpoint as a folder that Hugging Face transformers loads.

    grpo-eqx export CHECKPOINT --output FOLDER

    The folder has the weights (safetensors), config.json and the tokenizer, as the folder `model`
    that a run writes at its end. Runs on the CPU, also while the run goes on, and reads only the
    parameters, whatever devices the run had. Started on several hosts, the first one exports.
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """A run folder, for its newest checkpoint that can be read, or a checkpoint, such as
    RUN/checkpoints/step_100."""
    output: Path
    """Folder to write: missing or empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the tensors. float32: the run's parameters, bit for bit. bfloat16: half the size, as
    most models are published."""
    merge: bool = False
    """Merge the adapters of a run into its model, and write the whole. By default, the adapters
    alone are written, as PEFT does."""
    model: str | None = None
    """Folder or hub name with the run's config.json and tokenizer. None: the model that the run
    started from. Needed if that has moved, or a model was passed to GRPOTrainer."""

    def run(self, command: tuple[str, ...]) -> int:
        import jax

        from grpo_eqx.checkpoint.export import export
        from grpo_eqx.distributed.program_facts import check_xla_flags

        if (hosts := _of_other_host()) is not None:
            print_clean(f"nothing is written here: of {hosts} hosts, the first one exports")
            return 0
        check_xla_flags()
        # The run may be using the accelerator, which is not needed here.
        jax.config.update("jax_platforms", "cpu")
        written = export(
            self.checkpoint, self.output, self.dtype, _say, self.model, merge=self.merge
        )
        print_clean(
            f"wrote {written.num_parameters:,} parameters of {written.checkpoint} in {self.dtype}, "
            f"and the tokenizer, to {self.output}"
        )
        return 0


def _of_other_host() -> int | None:
    """Returns the number of hosts, unless this process is on the first host; `None` if it is."""
    from grpo_eqx.distributed.cluster import find_cluster

    try:
        cluster = find_cluster()
    except UserError:  # a run could not start like this, but an export can
        return None
    return None if cluster is None or cluster.process_id == 0 else cluster.num_processes


def _say(text: str) -> None:
    print_clean(text, file=sys.stderr)
