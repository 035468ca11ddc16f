"""Runs whose completions agents make, over HTTP."""

import asyncio
import contextlib
import json
import os
import random
import shlex
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import openai
import pyarrow.parquet as pq
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.common.errors import RunError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments import HarnessEndpoint
from grpo_eqx.environments.harness import HarnessSampler
from grpo_eqx.environments.tools import make_tools
from grpo_eqx.generation.local_sampler import LocalSampler
from grpo_eqx.generation.open_session import Request
from grpo_eqx.generation.sampler import NO_COUNTS, Sampled
from grpo_eqx.generation.sampling import Sampling
from tests.environments.arithmetic import add, multiply
from tests.environments.endpoint.test_tools import Scripted
from tests.environments.templates import HERMES, tokenizer_with
from tests.environments.test_acting import calls_often, settings
from tests.environments.test_environments import steps_of
from tests.tracking.test_metric_registry import OF_AGENTS

__all__ = ["calls_often", "settings"]


def client_of(endpoint: HarnessEndpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=300
    )


def asked(row: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": row["prompt"]}]


async def once(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
    """Asks once, and rewards short answers."""
    async with client_of(endpoint) as client:
        made = await client.chat.completions.create(model=endpoint.model, messages=asked(row))
    return -float(len(made.choices[0].message.content or ""))


class Calculating:
    """Agent with the tools of arithmetic, which asks again until it calls none.

    It waits at random, so that requests of a step have another order each time.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tools = {tool.name: tool for tool in make_tools([multiply, add])}

    async def __call__(self, endpoint: HarnessEndpoint, row: dict[str, Any]) -> None:
        messages = asked(row)
        schemas: Any = [tool.schema for tool in self.tools.values()]
        async with client_of(endpoint) as client:
            while True:
                for _ in range(self.random.randrange(20)):
                    await asyncio.sleep(0)
                try:
                    made = await client.chat.completions.create(
                        model=endpoint.model, messages=messages, tools=schemas
                    )
                except openai.BadRequestError:  # no room is left
                    break
                message = made.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                messages += [await self.answer(call) for call in message.tool_calls]

    async def answer(self, call: Any) -> dict[str, Any]:
        name, arguments = call.function.name, json.loads(call.function.arguments)
        if name not in self.tools:
            content = str({"error": f"Tool {name} not found."})
        else:
            made = self.tools[name].func(**arguments)
            content = str(await made if asyncio.iscoroutine(made) else made)
        return {"role": "tool", "tool_call_id": call.id, "content": content}


def rewarded(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(x["role"] == "assistant" for x in messages)) for messages in completions]


def assert_same_completions(run: dict[str, Any], like: dict[str, Any]) -> int:
    """Tokens and advantages are equal, and the log-probs, which only written tokens have."""
    own, expected = (
        [
            row
            for table in sorted((each["output_dir"] / "completions").glob("*.parquet"))
            for row in pq.read_table(table).to_pylist()
        ]
        for each in (run, like)
    )
    for name in ("prompt", "tokens", "truncated", "advantage"):
        assert [row[name] for row in own] == [row[name] for row in expected]
    for row, other in zip(own, expected, strict=True):  # the table rounds them
        np.testing.assert_allclose(row["token_logps"], other["token_logps"], rtol=0.01, atol=0.01)
    return max(row["length"] for row in own)


@pytest.mark.slow
def test_an_agent_that_asks_once_makes_the_same_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def short(completions: list[str], **columns: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    plain, own = ({**settings, "output_dir": tmp_path / x, "eval_steps": None} for x in "ab")
    GRPOTrainer(GRPOConfig(**plain), reward_funcs={"once": short}).fit()
    GRPOTrainer(GRPOConfig(**own), harness=once).fit()
    assert assert_same_completions(own, plain) > 60
    for step, expected in zip(steps_of(own), steps_of(plain), strict=True):
        assert step["rewards/once/mean"] == expected["rewards/once/mean"]
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert step["agents/requests"] == 1
        assert step.keys() >= OF_AGENTS


@pytest.mark.slow
def test_a_dialogue_of_an_agent_is_that_of_an_environment(
    settings: dict[str, Any], tmp_path: Path, calls_often: None
) -> None:
    """The same tokens, masks and gradients, whatever the order of requests."""
    runs = {}
    for name in ("tools", "first", "second"):
        own = runs[name] = {**settings, "output_dir": tmp_path / name, "eval_steps": None}
        by = {"tools": [multiply, add]} if name == "tools" else {"harness": Calculating(len(name))}
        GRPOTrainer(GRPOConfig(**own), reward_funcs=rewarded, **by).fit()
    for name in ("first", "second"):
        assert assert_same_completions(runs[name], runs["tools"]) > 60
        for step, like in zip(steps_of(runs[name]), steps_of(runs["tools"]), strict=True):
            assert step["rewards/rewarded/mean"] == like["rewards/rewarded/mean"]
            assert step["completions/clipped_ratio"] == like["completions/clipped_ratio"]
            assert step["loss"] == pytest.approx(like["loss"], abs=1e-6)
            assert step["grad_norm"] == pytest.approx(like["grad_norm"], rel=1e-4)
            assert step["agents/requests"] > 1.1
            assert step["agents/forks"] == step["agents/drifted_tokens"] == 0


ANSWER = "It is 3.<|im_end|>"


class Answering(Scripted):
    """Draws the same answer for each request."""

    counts = NO_COUNTS

    def __init__(self, ids: list[int]):
        super().__init__([])
        self.ids = ids

    def take(self, request: Request) -> int:
        self.turns.append(self.ids)
        return super().take(request)


class Rollouts:
    """Completes two prompts twice each by a harness, with a model that is made up."""

    def __init__(self, harness: Any, **settings: Any):
        tokenizer = tokenizer_with(HERMES)
        sizes = {"max_prompt_length": 40, "max_completion_length": 60}
        cfg = GRPOConfig(prompts_per_step=2, num_generations=2, **sizes, **settings).resolved()
        engine = Mock(spec=LocalSampler, options=Mock(sampling=Sampling()))
        ids = tokenizer.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
        engine.open_session.side_effect = lambda *_: Answering(ids)
        self.sampler = HarnessSampler(harness, engine, tokenizer, cfg, (4, 100))
        self.problems = [Prompt(f"{n} + {n}?", {"n": n}) for n in (1, 2)]
        tokens = tokenizer.encode_prompts(self.problems)
        self.begun = [Trajectory(tokens[p], Address(3, p, g)) for p in range(2) for g in range(2)]

    def made(self) -> Sampled:
        with self.sampler:
            return self.sampler.submit(self.begun, problems=self.problems).result()

    @property
    def rewards(self) -> list[float | None]:
        acted = self.made().acted
        assert acted is not None
        return list(acted.columns["harness_reward"])


def ask(endpoint: HarnessEndpoint, row: dict[str, Any]) -> str:
    with openai.OpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        made = client.chat.completions.create(model=endpoint.model, messages=asked(row))
    return made.choices[0].message.content or ""


def test_plain_functions_run_beside_each_other() -> None:
    together = threading.Barrier(4)

    def plain(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        together.wait(60)
        return len(ask(endpoint, row)) + row["n"]

    number = len("It is 3.")
    assert Rollouts(plain).rewards == [number + 1, number + 1, number + 2, number + 2]


def test_dialogues_and_rewards_reach_reward_functions() -> None:
    def unrewarded(endpoint: HarnessEndpoint, row: dict[str, Any]) -> None:
        ask(endpoint, row)
        row["n"] = "changed"  # in a copy

    rollouts = Rollouts(unrewarded)
    made = rollouts.made()
    assert made.acted is not None
    assert made.acted.columns["harness_reward"] == [None] * 4
    assert [x[0]["content"] for x in made.acted.messages] == ["It is 3."] * 4
    assert [each.address for each in made.trajectories] == [x.address for x in rollouts.begun]
    assert all(each.written.all() for each in made.trajectories)
    assert [problem.columns["n"] for problem in rollouts.problems] == [1, 2]


class OddOnes:
    """Fails in its own way for the second problem."""

    def __init__(self, fail: Any):
        self.fail = fail

    def __call__(self, endpoint: HarnessEndpoint, row: dict[str, Any]) -> Any:
        return self.fail(endpoint, row) if row["n"] == 2 else float(len(ask(endpoint, row)))


def raised(endpoint: HarnessEndpoint, row: dict[str, Any]) -> None:
    raise ValueError("of its own")


FAILURES = {
    "raised ValueError: of its own": raised,
    "returned 'good', which is not a number": lambda endpoint, row: ask(endpoint, row) and "good",
    "returned nan, which is not a number": lambda endpoint, row: (
        ask(endpoint, row) and float("nan")
    ),
    "ended without an answer of the model": lambda endpoint, row: 1.0,
    "raised AuthenticationError": lambda endpoint, row: ask(
        endpoint._replace(api_key="another"), row
    ),
}


@pytest.mark.parametrize("said", FAILURES)
def test_completions_of_a_run_that_fails_are_left_out(
    said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = Rollouts(OddOnes(FAILURES[said]))
    made = rollouts.made()
    assert made.acted is not None
    assert made.acted.lost == [False, False, True, True]
    assert f"warning: harness {said}" in capsys.readouterr().err
    rollouts.made()
    assert capsys.readouterr().err == ""  # said once


def test_a_run_that_takes_too_long_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    async def slow(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        if row["n"] == 2:
            await asyncio.Event().wait()
        return await once(endpoint, row)

    made = Rollouts(slow, harness_timeout=4.0).made()
    assert made.acted is not None
    assert made.acted.lost == [False, False, True, True]
    said = "harness ran out of time: it took more than 4 s (harness_timeout): its completion"
    assert said in capsys.readouterr().err


def test_a_step_without_a_run_that_succeeds_ends_the_training() -> None:
    with pytest.raises(RunError, match=r"raised ValueError: of its own.*all 4 runs of this step"):
        Rollouts(raised).made()
    with pytest.raises(RunError, match=r"of its own.*: fix it, or leave tool_failures unset"):
        Rollouts(OddOnes(raised), tool_failures="stop").made()


def test_the_port_is_closed_after_a_step() -> None:
    found = list[HarnessEndpoint]()

    def noted(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        found.append(endpoint)
        return float(len(ask(endpoint, row)))

    Rollouts(noted).made()
    assert len({endpoint.api_key for endpoint in found}) == 4
    with pytest.raises(openai.APIConnectionError):
        ask(found[0], {"prompt": "?"})


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
message = {"role": "user", "content": row["prompt"]}
body = {"model": os.environ["OPENAI_MODEL"], "messages": [message]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))
text = answer["choices"][0]["message"]["content"]
if row["n"] == 2 and "--fails" in sys.argv:
    sys.exit(text + " is wrong")
print("the answer was", text)
if "--silent" not in sys.argv:
    print(len(text) + row["n"])
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(PROGRAM)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / 'agent.py'))}"


def test_a_program_can_be_the_harness(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    number = len("It is 3.")
    assert Rollouts(program).rewards == [number + 1, number + 1, number + 2, number + 2]
    assert Rollouts(f"{program} --silent").rewards == [None] * 4
    assert Rollouts(f"{program} --fails").rewards == [number + 1, number + 1, None, None]
    assert "ended with exit code 1, and said 'It is 3. is wrong'" in capsys.readouterr().err


def test_a_program_ends_at_its_timeout_with_all_that_it_has_started(tmp_path: Path) -> None:
    script = tmp_path / "slow.sh"
    script.write_text(f"sleep 600 & echo $! >> {tmp_path}/pids; wait\n")
    with pytest.raises(RunError, match="harness_timeout"):
        Rollouts(f"sh {script}", harness_timeout=2.0).made()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_for_end(pid)


def test_a_program_has_ended_though_what_it_started_still_writes(tmp_path: Path) -> None:
    script = tmp_path / "leaves.sh"
    script.write_text(
        f"""cat > /dev/null
sleep 600 &
echo $! >> {tmp_path}/pids
{sys.executable} {tmp_path / "agent.py"} < {tmp_path / "row.json"}
"""
    )
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "row.json").write_text(json.dumps({"prompt": "?", "n": 0}))
    assert Rollouts(f"sh {script}").rewards == [len("It is 3.")] * 4
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ("", "harness is '', and it is empty"),
        ("no_such_program --x", "'no_such_program' is not found on the PATH"),
        ("python 'agent.py", "close its quotes"),
    ],
)
def test_what_cannot_be_a_harness(harness: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Rollouts(harness)


@pytest.mark.parametrize(
    ("passed", "changes", "said"),
    [
        ({}, {"harness_timeout": 3.0}, "harness_timeout is 3.0, and no harness is passed"),
        ({"harness": once, "tools": [add]}, {}, "harness is passed, and so are tools or"),
        (
            {"harness": once, "rollout_func": once},
            {},
            "rollout_func and harness are passed, and each makes whole completions",
        ),
        (
            {"harness": once},
            {"max_staleness": 1, "importance_sampling_mode": "none"},
            "max_staleness is 1, and a harness is passed",
        ),
        ({"harness": once}, {"tool_timeout": 1.0}, "tool_timeout is 1.0, and no tools"),
    ],
)
def test_settings_and_arguments_that_do_not_fit(
    settings: dict[str, Any], passed: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        GRPOTrainer(GRPOConfig(**settings, **changes), **passed)
