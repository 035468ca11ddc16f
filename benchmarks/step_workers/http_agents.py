"""Agents of `agent_requests.py`: `python http_agents.py ADDRESS AGENTS REQUESTS MAX_TOKENS`."""

import asyncio
import sys

import httpx


class Dialogue:
    """What an agent says."""

    def __init__(self, number: int):
        self.number = number
        self.messages = [{"role": "user", "content": f"I am agent {number}. What is {number} + 1?"}]

    def go_on(self, answer: str, turn: int) -> None:
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"I am agent {self.number}. And plus {turn}?"},
        ]


async def agent(client: httpx.AsyncClient, number: int, requests: int, max_tokens: int) -> None:
    dialogue = Dialogue(number)
    for turn in range(requests):
        answer = await client.post(
            "/chat/completions",
            json={"messages": dialogue.messages, "max_tokens": max_tokens},
            headers={"Authorization": f"Bearer key-{number}"},
        )
        answer.raise_for_status()
        dialogue.go_on(answer.json()["choices"][0]["message"]["content"], turn)


async def main(address: str, agents: int, requests: int, max_tokens: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{address}/v1", timeout=None, limits=limits) as client:
        await asyncio.gather(*(agent(client, n, requests, max_tokens) for n in range(agents)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
