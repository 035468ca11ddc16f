"""Rules on tools: calls that nobody makes, that fail, or that devices wait for."""

from collections.abc import Iterator
from statistics import fmean, median

from grpo_eqx.tracking.diagnosis.history import History
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_CALLS, _FAILED = "tools/call_frequency", "tools/failure_frequency"
_EVIDENCE = 256
"""Completions without a call that count as evidence. If one in fifty had a call, this many would
all have none in 1 of 200 cases."""
_WINDOW = 3
_MOST_FAIL = 0.9
_HALF = 0.5


def never_called(history: History) -> Iterator[Seen]:
    count = history.window_of(_EVIDENCE, history.completions, _WINDOW)
    calls = history.last(_CALLS, count)
    if len(calls) != count or any(calls):
        return
    clipped = history.last("completions/clipped_ratio", count)
    if len(clipped) == count and min(clipped) == 1:
        limit = history.setting("max_completion_length", "the limit")
        yield Seen(
            f"No completion of {history.span(count)} called a tool, or ended a turn: all were cut "
            f"off at max_completion_length ({limit}).",
            "Raise max_completion_length: a turn that is cut off has no calls, and is passed to no "
            "environment.",
        )
    else:  # in an environment that takes whole turns, one that ends is a call
        yield Seen(f"No completion of {history.span(count)} called a tool.")


def calls_fail(history: History) -> Iterator[Seen]:
    count = history.window(_WINDOW)
    calls, failed = history.last(_CALLS, count), history.last(_FAILED, count)
    if len(calls) == len(failed) == count and all(calls) and median(failed) >= _MOST_FAIL:
        yield Seen(f"{fmean(failed):.0%} of the calls of {history.span(count)} failed.")


def slow(history: History) -> Iterator[Seen]:
    count = history.window(_WINDOW)
    waits, steps = (history.last(x, count) for x in ("time/tools/wait_s", "step_time"))
    if len(waits) != count or len(steps) != count or not sum(waits) >= _HALF * sum(steps):
        return
    seconds = history.newest("time/tools/call_s")
    yield Seen(
        f"For {sum(waits) / sum(steps):.0%} of the time of {history.span(count)}, no completion "
        f"decoded, because all waited for calls, which took {seconds:.3g} s on average."
    )


NEVER_CALLED = Rule(
    name="tools_never_called",
    metric=_CALLS,
    symptom="No completion calls a tool, or ends a turn of its game (`tools/call_frequency`), over "
    "three steps and 256 completions, or all that a shorter run has.",
    cause="The model does not know the format of calls, or has no reason to call; or turns are cut "
    "off before they end.",
    advice="Read a few completions: where they have no calls, ask for them in system_prompt, and "
    "begin with a model that was trained with tools; where they have, the chat template writes "
    "calls in another format; where they are cut off, raise max_completion_length.",
    look=never_called,
    steps=lambda history: history.window_of(_EVIDENCE, history.completions, _WINDOW),
)
CALLS_FAIL = Rule(
    name="tools_fail",
    metric=_FAILED,
    symptom="Nine in ten calls fail (`tools/failure_frequency`) over three steps.",
    cause="A tool is broken, or the model calls it with wrong arguments.",
    advice="Read the answers with grpo-eqx inspect. Of a tool that raises, a warning has the first "
    "error, and tool_failures stop ends the run there. Calls of unknown tools, or with wrong "
    "arguments, are only answered: where there are many, explain the arguments in the tools' "
    "docstrings, and begin with a model that was trained with tools.",
    look=calls_fail,
    steps=lambda history: history.window(_WINDOW),
)
SLOW = Rule(
    name="tools_slow",
    metric="time/tools/wait_s",
    symptom="Over three steps, no completion decodes for half of the time, because all wait for "
    "calls (`time/tools/wait_s`).",
    cause="Calls are slow, or a few take far longer than others.",
    advice="Set tool_timeout, make tools async where they wait for others, or sample more "
    "completions in a step.",
    look=slow,
    steps=lambda history: history.window(_WINDOW),
)
