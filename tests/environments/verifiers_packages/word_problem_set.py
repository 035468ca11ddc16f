"""A package of the kind that verifiers loads: a set of tasks, and a harness."""

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.core import chat

from grpo_eqx.data.word_problems import WordProblems

__all__ = ["WordProblemHarness", "WordProblemSet"]


class WordProblemData(vf.TaskData):
    answer: str
    """The last line of the solution."""


class WordProblem(vf.Task[WordProblemData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        first = trace.assistant_messages[0].content or ""  # the model knows single turns only
        return float(first.splitlines()[-1:] == [self.data.answer])

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return 0.125 * trace.num_turns


class WordProblemConfig(vf.TasksetConfig):
    num_tasks: int | None = None


class WordProblemSet(vf.Taskset[WordProblem, WordProblemConfig]):
    @property
    def bounded(self) -> bool:
        return self.config.num_tasks is not None

    def load(self) -> Iterator[WordProblem]:
        source = WordProblems()
        numbers = (
            itertools.count() if self.config.num_tasks is None else range(self.config.num_tasks)
        )
        for number in numbers:
            problem = source[number % len(source)]
            answer = problem.columns["answer"].splitlines()[-1]
            data = WordProblemData(prompt=problem.content, answer=answer)
            yield WordProblem(data, self.config.task)


class WordProblemHarnessConfig(vf.HarnessConfig):
    turns: int = 1


class WordProblemHarness(vf.Harness[WordProblemHarnessConfig]):
    """Asks one time or more, with the client and the stream's loop of verifiers' chat program."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: list[dict[str, Any]] = []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(self.config.turns):
                messages.append({"role": "user", "content": data.prompt_text})
                made = await chat(client, ctx.model, messages, [])
                messages.append(made.choices[0].message.model_dump(exclude_none=True))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
