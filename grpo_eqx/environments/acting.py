"""A sampler whose completions call tools and act in environments."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from grpo_eqx.common.errors import RunError
from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.batches import padded_length
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.distributed.exchange import gather_json, own_share, raise_on_all_hosts
from grpo_eqx.environments.calls import interruptible
from grpo_eqx.environments.chat_format import ChatFormat
from grpo_eqx.environments.dialogues import Dialogue, Dialogues, ToolLimits
from grpo_eqx.environments.pool import Environments
from grpo_eqx.environments.starts import Start, started, with_one_prompt
from grpo_eqx.generation.pending import Ahead
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, Sampler, Until
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.models.interface import CausalLM


class ActingSampler(Sampler):
    """Sampler of dialogues: another one completes turns, and tools and environments answer.

    Enter it as a context, as often as you like: leaving the first one closes all environments.
    """

    def __init__(
        self,
        sampler: Sampler,
        environments: Environments,
        tokenizer: ChatTokenizer,
        limits: ToolLimits,
        *,
        max_prompt_length: int,
        max_completion_length: int,
    ):
        """**Arguments:**

        - `sampler`: completes turns.
        - `environments`: the tools and environments.
        - `tokenizer`: the tokenizer, which reads and writes turns.
        - `limits`: limits on dialogues.
        - `max_prompt_length`, `max_completion_length`: limits on tokens.

        Raises `UserError` for a chat template in which the dialogues cannot be written.
        """
        self._sampler, self._limits, self._environments = sampler, limits, environments
        self._tokenizer, self._max_prompt_length = tokenizer, max_prompt_length
        self._max_completion_length = max_completion_length
        self._chat = ChatFormat(
            tokenizer,
            has_tools=any(environments.schemas.values()),
            has_users=any(kind.takes_turns for kind in environments.kinds.values()),
        )
        self._last: PendingSamples | None = None
        self._carried: Dialogues | None = None
        """Dialogues that go on from one batch to the next."""
        self._failed_before = set[str]()
        self._interruptible = contextlib.ExitStack()
        self._depth = 0
        self.width_of_trial: int | None = None
        """Width of the prompt that an environment made when it was tried."""

    def set_weights(self, model: CausalLM, version: int) -> None:
        self._sampler.set_weights(model, version)

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling | None = None,
        *,
        problems: Sequence[Prompt | None] | None = None,
        prompt_width: int | None = None,
        responder: Responder | None = None,
        until: Until | None = None,
    ) -> PendingSamples:
        assert problems is not None, "environments are reset for problems"
        assert responder is None, "tools and environments respond"
        last, self._last = self._last, None
        if last is not None:
            last.result()  # two batches would hold two caches
        numbers = range(len(trajectories))
        by_prompt = itertools.groupby(numbers, lambda n: trajectories[n].address[:2])
        of_prompts = [list(group) for _, group in by_prompt]
        if until is None:
            mine, silent = _own_groups(of_prompts, [each is not None for each in problems])
        else:
            mine, silent = self._new_groups(trajectories, of_prompts, problems), []
        own = {n: problem for p in mine for n in of_prompts[p] if (problem := problems[p])}
        groups, fix = [of_prompts[p] for p in mine], None
        if self._limits.failures == "stop":
            fix = "fix it, or set tool_failures to answer, which leaves the completion out"
        starts = raise_on_all_hosts(lambda: self._started(groups, own, fix))
        trajectories = _with_prompts(trajectories, of_prompts, starts)
        self._check_room(trajectories)
        for n, start in starts.items():
            start.dialogue.num_read = len(trajectories[n])
            start.dialogue.content = start.content
            start.dialogue.address = trajectories[n].address
        if self._environments.kinds:
            longest = max(len(each.prompt_ids) for each in trajectories)
            prompt_width = padded_length(longest, self._max_prompt_length)
        dialogues = self._carried
        if until is None or dialogues is None:
            dialogues = Dialogues(
                {}, [n for p in silent for n in of_prompts[p]],
                self._chat, self._environments.calls, self._limits, self._failed_before,
            )  # fmt: skip
        dialogues.dialogues.update({n: start.dialogue for n, start in starts.items()})
        dialogues.waited = 0.0
        if until is not None:
            self._carried = dialogues
        pending = self._sampler.submit(
            trajectories, sampling, prompt_width=prompt_width, responder=dialogues, until=until
        )
        self._last = _PendingDialogues(
            pending, dialogues, self._chat, self._environments, is_carried=until is not None
        )
        return self._last

    def _new_groups(
        self,
        trajectories: Sequence[Trajectory],
        of_prompts: Sequence[Sequence[int]],
        problems: Sequence[Prompt | None],
    ) -> list[int]:
        """Returns the prompts of this process whose completions have no dialogues yet.

        Those that were in their places end.
        """
        known = {} if self._carried is None else self._carried.dialogues
        new = list[int]()
        for p in range(len(of_prompts))[own_share(len(of_prompts))]:
            before = {n: known[n] for n in of_prompts[p] if n in known}
            if problems[p] is None or any(
                each.address == trajectories[n].address for n, each in before.items()
            ):
                continue
            _release(before.values(), self._environments)
            new.append(p)
        return new

    def __enter__(self) -> "ActingSampler":
        self._depth += 1
        self._interruptible.enter_context(interruptible())
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._last = self._carried = None
            try:
                self._environments.close()
            finally:
                self._interruptible.close()

    @contextlib.contextmanager
    def trial(self, problem: Prompt) -> Iterator[Start]:
        """Starts a completion of a problem, which ends with the block, and workers of tools.

        Raises `RunError` where its environment fails, and `UserError` where a worker cannot import
        a tool.
        """
        self._environments.workers.start()
        fix = "fix it. This was a trial before the first rollout"
        start = self._started([[0]], {0: problem}, fix)[0]
        if start.ids is not None:
            self.width_of_trial = padded_length(len(start.ids), self._max_prompt_length)
        try:
            yield start
        finally:
            self._environments.give_back(start.dialogue.environment)

    def _started(
        self, groups: Sequence[Sequence[int]], problems: Mapping[int, Prompt], fix: str | None
    ) -> dict[int, Start]:
        return started(
            self._environments, groups, problems, self._tokenizer,
            max_prompt_length=self._max_prompt_length, fix=fix,
        )  # fmt: skip

    def _check_room(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises `RunError` for completions that begin with too many tokens."""
        longest = max((len(each) for each in trajectories if not each.written.any()), default=0)
        if longest >= self._max_completion_length:
            raise RunError(
                f"reset returned different prompts for completions of one problem, and {longest} "
                f"tokens after the first difference count as the completion's, of which "
                f"max_completion_length is {self._max_completion_length}: raise it, or return the "
                f"same prompt for the same row."
            )


def _release(dialogues: Iterable[Dialogue], environments: Environments) -> None:
    """Gives the environments of dialogues back; those that failed are lost."""
    for dialogue in dialogues:
        give = environments.lose if dialogue.is_lost else environments.give_back
        give(dialogue.environment)


def _own_groups(
    of_prompts: Sequence[Sequence[int]], is_real: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Returns the prompts whose completions this process answers, and those that it ends at once.

    The former are its share of the real ones, which it also rewards.
    """
    real = [p for p in range(len(of_prompts)) if is_real[p]]
    filling = [p for p in range(len(of_prompts)) if not is_real[p]]
    is_last = jax.process_index() == jax.process_count() - 1
    return real[own_share(len(real))], filling if is_last else []


def _with_prompts(
    trajectories: Sequence[Trajectory],
    of_prompts: Sequence[Sequence[int]],
    starts: Mapping[int, Start],
) -> list[Trajectory]:
    """Returns trajectories with the prompts that the environments of all processes have made."""
    changed = _everyones({n: x.ids for n, x in starts.items() if x.ids is not None})
    own = [
        dataclasses.replace(each, prompt_ids=changed.get(n, each.prompt_ids))
        for n, each in enumerate(trajectories)
    ]
    return [each for group in of_prompts for each in with_one_prompt([own[n] for n in group])]


def _everyones(own: Mapping[int, Any]) -> dict[int, Any]:
    """Returns what all processes have, by number."""
    return {int(number): each for part in gather_json(own) for number, each in part.items()}


class _PendingDialogues(PendingSamples):
    """Dialogues of a batch."""

    def __init__(
        self,
        pending: PendingSamples,
        dialogues: Dialogues,
        chat: ChatFormat,
        environments: Environments,
        *,
        is_carried: bool,
    ):
        self._pending, self._dialogues = pending, dialogues
        self._chat, self._environments, self._is_carried = chat, environments, is_carried
        self._result: Sampled | None = None

    def result(self) -> Sampled:
        if self._result is None:
            self._result = self._finished()
        return self._result

    def in_background(self) -> PendingSamples:
        return Ahead(self)

    def release(self) -> None:
        if self._is_carried:
            return  # those that have ended make room for others
        _release(self._dialogues.dialogues.values(), self._environments)

    def _finished(self) -> Sampled:
        sampled = self._pending.result()
        number, own = len(sampled.trajectories), self._dialogues.dialogues
        made = _everyones(raise_on_all_hosts(lambda: self._read(sampled.trajectories)))
        acted = Acted(
            [made[n][2] if n in made else "" for n in range(number)],
            [made[n][0] if n in made else [] for n in range(number)],
            [own[n].environment if n in own else None for n in range(number)],
            [ToolCounts(*made[n][1]) if n in made else ToolCounts(0) for n in range(number)],
            self._dialogues.waited,
        )
        if 0 < acted.counts.completions == acted.counts.lost:
            raise RunError(
                "the environments of all completions failed, so that none has a reward: fix them; "
                "a warning above has the first failure."
            )
        return sampled._replace(acted=acted)

    def _read(self, trajectories: Sequence[Trajectory]) -> dict[int, Any]:
        """Returns messages, counts and prompts of this process's dialogues."""
        ended = {
            n: each
            for n, each in self._dialogues.dialogues.items()
            if trajectories[n].finish_reason is not None and trajectories[n].address == each.address
        }
        for number, dialogue in ended.items():
            dialogue.finish(trajectories[number], self._chat)
        return {n: (each.messages, each.counts, each.content) for n, each in ended.items()}
