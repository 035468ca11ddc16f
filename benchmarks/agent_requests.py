"""What HTTP costs: agents' dialogues over the endpoint, beside the same requests without it.

Each agent asks several times, and each time goes on with what was answered. Both ways have the same
session, the same draws and the same number of tokens.

    python benchmarks/agent_requests.py --agents 256 --requests 4
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.endpoint.app import Endpoint
from grpo_eqx.environments.endpoint.exchange import Exchange
from grpo_eqx.environments.endpoint.recorder import Recorder, RecordOptions
from grpo_eqx.environments.endpoint.server import listening, served
from grpo_eqx.evaluation.served_model import ServedModel
from grpo_eqx.generation.open_session import OpenSession, Request
from grpo_eqx.generation.sampling import Sampling

AGENTS = Path(__file__).parent / "step_workers" / "http_agents.py"


@dataclasses.dataclass
class Options:
    model: str = "tiny_qwen2"
    agents: int = 256
    requests: int = 4
    """Requests of each agent, one after the other."""
    slots: int = 64
    max_tokens: int = 48
    """Tokens of an answer."""
    repeats: int = 3


def over_http(
    session: OpenSession, chat: ChatFormats, options: Options, ended: list[float]
) -> dict[str, Recorder]:
    """Has agents ask over HTTP; returns what was recorded of each."""
    record = RecordOptions(chat, Sampling(), 200, session.max_length - 200, 1024)
    clients = {
        f"key-{n}": Recorder(Trajectory([1], Address(0, n, 0)), record)
        for n in range(options.agents)
    }
    exchange = Exchange(session)
    endpoint = Endpoint(exchange, chat, "m", clients.get)
    with served(endpoint, listening("127.0.0.1", 0, "--port")) as address:
        numbers = map(str, (options.agents, options.requests, options.max_tokens))
        process = subprocess.Popen([sys.executable, str(AGENTS), address, *numbers])

        def has_ended() -> bool:
            if session.is_idle:
                ended.append(time.perf_counter())
            return process.poll() is not None

        exchange.run(has_ended)
        assert process.returncode == 0
    return clients


def alone(session: OpenSession, told: Sequence[Sequence[Request]]) -> float:
    """Gives the same requests to the session as soon as those before are answered."""
    start, left = time.perf_counter(), [list(each) for each in told]
    of_number = {session.take(own.pop(0)): own for own in left}
    while of_number:
        for drawn in session.step():
            if drawn.finish_reason is not None:
                own = of_number.pop(drawn.number)
                if own:
                    of_number[session.take(own.pop(0))] = own
    return time.perf_counter() - start


def main(options: Options) -> None:
    model = ServedModel(options.model, {}, print)
    chat = ChatFormats(model.tokenizer)

    def opened() -> OpenSession:
        return model.session(options.slots, 800)

    figures: dict[str, list[float]] = {"http": [], "alone": []}
    for repeat in range(options.repeats + 1):
        session, told = opened(), dict[int, list[Request]]()
        take, times, ended = session.take, list[float](), list[float]()

        def noted(request: Request, told: Any = told, take: Any = take, times: Any = times) -> int:
            told.setdefault(request.address.prompt, []).append(request)
            times.append(time.perf_counter())
            return take(request)

        session.take = noted  # type: ignore[method-assign]
        clients = over_http(session, chat, options, ended)
        seconds = next(t for t in ended if t > times[-1]) - times[0]
        tokens = session.counts.tokens
        for n, recorder in enumerate(clients.values()):
            made = recorder.trajectory(0)
            assert made is not None
            assert recorder.counts == (options.requests, 0, 0, 0)
            text = chat.tokenizer.tokenizer.decode(made.ids[~made.written])
            assert text.count(f"I am agent {n}.") == options.requests - 1
            assert text.count("I am agent") == options.requests - 1
        again = opened()
        own = alone(again, [told[n] for n in sorted(told)])
        assert again.counts.tokens == tokens
        if repeat:  # the first compiles
            figures["http"].append(tokens / seconds)
            figures["alone"].append(tokens / own)
        print(
            json.dumps(
                {
                    "tokens": tokens,
                    "http_s": seconds,
                    "alone_s": own,
                    "idle_http": 1 - session.counts.tokens / session.counts.slots,
                    "idle_alone": 1 - again.counts.tokens / again.counts.slots,
                    "steps": (session.counts.steps, again.counts.steps),
                }
            )
        )
    if not options.repeats:
        return
    medians = {name: statistics.median(x) for name, x in figures.items()}
    print(json.dumps({"tokens_per_s": medians, "ratio": medians["http"] / medians["alone"]}))


if __name__ == "__main__":
    main(tyro.cli(Options))
