"""The findings of a run on a console."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from grpo_eqx.tracking.diagnosis import RULES, Finding, Rule
from grpo_eqx.tracking.diagnosis.history import History
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.tracking.safe_console import safe_console

_INDENT = 6
_LABELS = {"sickness": Text("sick  ", "bold red"), "note": Text("note  ", "bold blue")}


def show_findings(run: RecordedRun, findings: Sequence[Finding]) -> None:
    """Prints findings with steps, numbers and advice, and for a healthy run, the rules checked."""
    console = safe_console()
    steps, evaluations = len(run.steps), len(run.evaluations)
    if not run.steps:
        _print(console, Text(f"{run.name}: no step is recorded yet", "bold"))
        return
    is_healthy = all(finding.kind == "note" for finding in findings)
    done = f"{_counted(steps, 'step')} and {_counted(evaluations, 'evaluation')}"
    heading = f"{run.name}: {'healthy' if is_healthy else 'sick'} after {done}"
    _print(console, Text(heading, "bold"))
    last = int(run.steps[-1]["step"])
    for finding in findings:
        title = Text(f"{finding.rule}, {finding.span(last)}", "bold")
        _print(console, _LABELS[finding.kind] + title)
        _print(console, Text(finding.text), indent=_INDENT)
        _print(console, Text.assemble(("To do: ", "bold"), finding.advice), indent=_INDENT)
    if is_healthy:
        found = {finding.rule for finding in findings}
        rules = [
            rule for rule in RULES
            if rule.kind == "sickness" and rule.name not in found and _can_see(rule, run)
        ]  # fmt: skip
        history = History(run.settings, run.num_devices)
        needed = {rule.name: rule.steps(history) for rule in rules}
        checked = [name for name, number in needed.items() if number <= steps]
        words = f"{_counted(len(checked), 'rule')} found nothing: {', '.join(checked)}"
        _print(console, Text.assemble(("healthy  ", "bold green"), words))
        waiting = [f"{name} ({number})" for name, number in needed.items() if number > steps]
        if waiting:
            words = f"rules that look at more steps: {', '.join(waiting)}"
            _print(console, Text.assemble(("unknown  ", "bold yellow"), words))


def _print(console: Console, text: Text, indent: int = 0) -> None:
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)))
    else:  # a single line, easy to search
        console.print(Text(" " * indent) + text, soft_wrap=True)


def _can_see(rule: Rule, run: RecordedRun) -> bool:
    """Returns whether the run has recorded the rule's metric."""
    start = rule.metric.partition("{")[0]
    rows = [*run.steps[-1:], *(run.evaluations[-1:] if len(run.evaluations) > 1 else ())]
    return any(name.startswith(start) for row in rows for name in row)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
