"""Rules on how a step uses the devices."""

from collections.abc import Iterator
from statistics import fmean, median

from grpo_eqx.tracking.diagnosis.history import History
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_MOST_IDLE = 1 / 3
"""Largest healthy share of padding, of idle slots, or of waiting devices: of lost time."""
_WINDOW = 10
_REMAINDER = 8192
"""Most positions in a row, and positions of a micro-batch by default. Rows fill up to the last
micro-batch, so fewer wasted positions are the normal remainder of a small batch."""
_FEW_SLOTS = 32
"""Slots per device up to which idle slots cost no time, because a decoding step reads all weights
for any number of slots. The number is larger if devices share the weights."""
_STARTED = 3
"""First steps, which may compile: two widths of prompts, and programs of evaluations and dynamic
sampling."""
_COMPILES = 0.8
"""Share of steps that compile. A healthy run has few programs (`compile/num_shapes/*`)."""
_COMPILE_TIME = 0.1
"""Smallest share of the time at which compilation matters."""


def padding(history: History) -> Iterator[Seen]:
    if not history.newest("perf/padding_share") > _MOST_IDLE:
        return
    share = _median(history, "perf/padding_share")
    if share is None or share <= _MOST_IDLE:
        return
    size = history.settings.get("micro_batch_size_per_device")
    to_lower = isinstance(size, int) and size > 1
    if not to_lower and _wasted(history, share) < _REMAINDER:
        return
    yield Seen(
        f"{share:.0%} of the positions in the updates' rows are padding ({history.span(_WINDOW)}).",
        f"Lower micro_batch_size_per_device ({size})." if to_lower else None,
    )


def idle_slots(history: History) -> Iterator[Seen]:
    if not history.newest("perf/slot_utilization") < 1 - _MOST_IDLE:
        return
    used = _median(history, "perf/slot_utilization")
    if used is None or used >= 1 - _MOST_IDLE:
        return
    completions, devices = history.completions, history.num_devices
    slots = min(int(history.setting("max_num_seqs", completions)), completions)
    if devices is None or slots <= _FEW_SLOTS * devices:
        return
    staleness = int(history.setting("max_staleness", 0))
    # With devices that sample, one of these steps is for sampling ahead: it carries nothing over.
    if staleness > (history.setting("rollout_devices", None) is not None):
        yield Seen(
            f"{1 - used:.0%} of the rollout's slots are idle ({history.span(_WINDOW)}), although "
            f"completions go on in the next step: with max_staleness {staleness}, steps wait for "
            f"groups that would become too old.",
            "Raise max_staleness, or lower max_num_seqs.",
        )
        return
    number = f"all {slots}" if slots == completions else f"{slots} of {completions}"
    if history.prompts % devices:  # each device refills slots from its own prompts
        advice = "Lower max_completion_length, or make prompts_per_step a multiple of the devices "
        advice += "and set max_num_seqs to a quarter of the completions."
    else:
        fewer = devices * max(slots // 4 // devices, _FEW_SLOTS)
        advice = f"Set max_num_seqs to {fewer}, so that slots are refilled as they end; or lower "
        advice += "max_completion_length."
    yield Seen(
        f"{1 - used:.0%} of the rollout's slots are idle ({history.span(_WINDOW)}): {number} "
        f"completions are decoded at a time, and most end long before the longest.",
        advice,
    )


def imbalance(history: History) -> Iterator[Seen]:
    if not history.newest("perf/balance") < 1 - _MOST_IDLE:
        return
    balance = _median(history, "perf/balance")
    if balance is None or balance >= 1 - _MOST_IDLE or _wasted(history, 1 - balance) < _REMAINDER:
        return
    yield Seen(
        f"The average device has {balance:.0%} of the tokens of the fullest one in an update "
        f"({history.span(_WINDOW)}), and waits for it."
    )


def compiles(history: History) -> Iterator[Seen]:
    name = "compile/num_programs"
    if not history.newest(name) > 0 or len(history.steps) < _STARTED + _WINDOW:
        return
    counts = history.last(name, _WINDOW)
    seconds, total = (sum(history.last(x, _WINDOW)) for x in ("compile/seconds", "step_time"))
    share = sum(count > 0 for count in counts) / _WINDOW
    if share < _COMPILES or seconds < _COMPILE_TIME * total:
        return
    yield Seen(
        f"{share:.0%} of {history.span(_WINDOW)} compiled programs, {fmean(counts):.1f} each. "
        f"Compiling took {seconds:.1f} s, and the steps {total:.1f} s."
    )


def _median(history: History, name: str) -> float | None:
    """Returns a metric's median in the window; `None` if the run is shorter than the window.

    Such a short run loses no time that matters.
    """
    values = history.last(name, _WINDOW)
    return median(values) if len(values) == _WINDOW else None


def _wasted(history: History, share: float) -> float:
    """Returns the positions of an update that do no work; infinity if this is unknown."""
    rates = history.last("perf/tokens_per_second/update", 1)
    seconds = history.last("time/train/update_s", 1)
    if not rates or not seconds:
        return float("inf")
    trained = rates[0] * seconds[0] / int(history.setting("num_iterations", 1))
    return trained * share / max(1 - share, 1e-6)


PADDING = Rule(
    name="padding",
    metric="perf/padding_share",
    symptom="More than a third of the positions in the updates' rows are padding "
    "(`perf/padding_share`, the median of ten steps), and more than the remainder of a small "
    "batch.",
    cause="Micro-batches are large beside the batch, or completions are far shorter than "
    "`max_completion_length`, which rows are made for.",
    advice="Lower micro_batch_size_per_device or max_completion_length, or raise prompts_per_step.",
    look=padding,
    steps=lambda history: _WINDOW,
)
IDLE_SLOTS = Rule(
    name="idle_slots",
    metric="perf/slot_utilization",
    symptom="More than a third of the rollout's slots are idle (`perf/slot_utilization`, the "
    "median of ten steps), and there are more than 32 for each device.",
    cause="A few long completions keep the others' slots waiting.",
    advice="Set max_num_seqs to a quarter of what is decoded at a time, but at least 32 for each "
    "device, so that slots are refilled as they end; or lower max_completion_length, or set "
    "max_staleness, so that long completions go on in the next step.",
    look=idle_slots,
    steps=lambda history: _WINDOW,
)
IMBALANCE = Rule(
    name="imbalance",
    metric="perf/balance",
    symptom="The average device has less than two thirds of the tokens of the fullest "
    "(`perf/balance`, the median of ten steps), and more than the remainder of a small batch.",
    cause="There are too few rows to deal to the devices.",
    advice="Raise prompts_per_step to a multiple of the devices, or lower "
    "micro_batch_size_per_device.",
    look=imbalance,
    steps=lambda history: _WINDOW,
)
COMPILES = Rule(
    name="compiles_in_every_step",
    metric="compile/num_programs",
    symptom="After the first three steps, eight of ten steps compile a program "
    "(`compile/num_programs`), and that takes a tenth of their time.",
    cause="A reward function, a callback or an optimizer of your own calls JAX with new shapes "
    "in every step.",
    advice="Jit such functions once, outside, and pad their inputs to one shape; "
    "JAX_LOG_COMPILES=1 names what is compiled.",
    look=compiles,
    steps=lambda history: _STARTED + _WINDOW,
)
