"""The command `grpo-eqx compile`."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_eqx.cli.flags import RunFlags, start
from grpo_eqx.cli.train import evaluates
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import OutOfMemoryError, UserError, first_line
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.settings.config import GRPOConfig

if TYPE_CHECKING:
    import jax

    from grpo_eqx.tracking.stages import Stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(RunFlags, Subcommand):
    """Compile the programs of a run for the devices of this machine, so that train starts warm.

    grpo-eqx compile [flags of train]

    Fills JAX's cache of compiled programs, without loading weights, training, or creating the run's
    folder. On several hosts, start it on all of them, with JAX_COMPILATION_CACHE_DIR set to a
    folder that they share.
    """

    def run(self, command: tuple[str, ...]) -> int:
        start(self, _compile)
        return 0


def _compile(cfg: GRPOConfig) -> None:
    from grpo_eqx.distributed.exchange import raise_on_all_hosts
    from grpo_eqx.distributed.startup import is_main
    from grpo_eqx.tracking.stages import Stages

    folder, stages = raise_on_all_hosts(_cache_to_fill), Stages()
    for name, lower in _programs(cfg, stages):
        began = time.monotonic()
        with stages.lasting(f"compiling {name}"):
            how = _compiled(name, lower())
        if is_main():
            print_clean(f"{name}: {how}, {time.monotonic() - began:.1f} s")
    if is_main():
        print_clean(f"the cache is in {folder}; grpo-eqx train with the same flags reads it")


def _cache_to_fill() -> str:
    """Turns on the cache of compiled programs, and returns its folder.

    Raises `UserError` if there is no cache, or if this process must write it and cannot.
    """
    import jax

    from grpo_eqx.cli.machine_checks import unwritable
    from grpo_eqx.distributed.startup import is_main
    from grpo_eqx.training.compilation import use_compilation_cache

    settings: Any = jax.config  # its attributes are created at run time
    if not settings.jax_enable_compilation_cache:
        raise UserError(
            "there is no cache of compiled programs to fill, as JAX_ENABLE_COMPILATION_CACHE is "
            "false: unset it."
        )
    folder = use_compilation_cache()
    if folder is None:
        where = "a folder that all processes share" if jax.process_count() > 1 else "a folder"
        raise UserError(
            f"there is no cache of compiled programs to fill: set JAX_COMPILATION_CACHE_DIR to "
            f"{where}, for compile and for train."
        )
    problem = None if "://" in folder or not is_main() else unwritable(Path(folder))
    if problem is not None:
        raise UserError(
            f"compiled programs cannot be kept, as {problem}: set JAX_COMPILATION_CACHE_DIR to a "
            f"writable folder, for compile and for train."
        )
    # Programs that the user asks for are kept, even if they compile quickly.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return folder


def _programs(
    cfg: GRPOConfig, stages: "Stages"
) -> Iterator[tuple[str, Callable[[], "jax.stages.Lowered"]]]:
    """Yields the programs that `train` calls, by name, to be lowered from shapes."""
    import jax

    from grpo_eqx.data.batches import prompt_widths
    from grpo_eqx.planner.search import fitting
    from grpo_eqx.run.passed import Passed
    from grpo_eqx.run.programs import make_programs
    from grpo_eqx.run.spec import RunSpec
    from grpo_eqx.run.to_compile import EVALUATE, EVALUATE_SAMPLES, in_order_of_use, run_programs

    with stages.lasting("loading the tokenizer and the problems"):
        run, inputs = RunSpec.load(cfg.resolved(), Passed())
    mesh, rollout_mesh = run.build_mesh(), run.rollout_mesh()
    run.check_batches(mesh, rollout_mesh)
    run = fitting(run, jax.devices(), stages.say)
    programs = make_programs(run, mesh, inputs.tokenizer, rollout_mesh=rollout_mesh)
    widths = prompt_widths([len(x) for x in inputs.train.tokens], run.cfg.prompts_per_step)
    for key, lower in in_order_of_use(run, programs, widths):
        yield str(key), lower
    if evaluates(cfg):
        wanted = EVALUATE, EVALUATE_SAMPLES
        yield from ((x.name, x.lower) for x in run_programs(run, programs) if x.name in wanted)


def _compiled(name: str, lowered: "jax.stages.Lowered") -> str:
    """Compiles a program, unless it is in the cache; returns what was done, in words.

    Raises `UserError` if the program does not fit the devices, or cannot be kept.
    """
    import jax

    from grpo_eqx.training.compilation import CompilationCounter

    counter = CompilationCounter()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Error writing persistent compilation cache")
        try:
            lowered.compile()
        except UserWarning as warning:
            raise UserError(
                f"{name} is compiled, but cannot be kept ({first_line(warning)}): set "
                f"JAX_COMPILATION_CACHE_DIR to a writable folder, for compile and for train."
            ) from warning
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(
                f"{name} does not fit the devices ({first_line(error)}): grpo-eqx plan with the "
                f"same flags says what does."
            ) from error
    counts = counter.metrics()
    if counts["compile/num_programs"] == 0:
        return "the same program as one above"
    return "found in the cache" if counts["compile/num_cache_hits"] else "compiled"
