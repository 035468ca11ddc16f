"""Progress of long loops, on a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.progress import track

from grpo_eqx.distributed.startup import is_main
from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.run_console import safe_console


def track_on_terminal(items: Sequence[int], description: str) -> Iterable[int]:
    """Iterates with a progress bar, shown only on the main process's terminal and then removed.

    While a live display is on, it says how far the loop is.
    """
    if PHASES.are_shown:
        return _as_phase(items, description)
    console = safe_console()
    hidden = not (console.is_terminal and is_main())
    return track(items, description, console=console, transient=True, disable=hidden)


def _as_phase(items: Sequence[int], description: str) -> Iterator[int]:
    with PHASES.lasting(Phase(description, total=len(items))) as phase:
        for item in items:
            yield item
            phase.done += 1
