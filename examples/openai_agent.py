"""Trains an agent that is written against OpenAI's client, as it is.

pip install openai
python examples/openai_agent.py
"""

import dataclasses
import json
import re
import runpy
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_eqx import GRPOConfig, GRPOTrainer, cli
from grpo_eqx.distributed import is_main
from grpo_eqx.environments import HarnessEndpoint

CALCULATOR = runpy.run_path(str(Path(__file__).parent / "calculator.py"))
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Adds, subtracts and multiplies.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Whole numbers with +, - and * between them, such as "
                        "12*34+5.",
                    }
                },
                "required": ["expression"],
            },
        },
    }
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig(GRPOConfig):
    """Settings of the example."""

    model: str = str(Path(__file__).parent / "tiny_agent")
    output_dir: Path | None = Path("runs/openai_agent")
    steps: int = 40
    prompts_per_step: int = 16
    num_generations: int = 8
    learning_rate: float = 2e-4
    max_prompt_length: int = 256
    max_completion_length: int | None = 128


def result_of(call: Any) -> str:
    """Runs a call, and returns what the model reads of it."""
    try:
        return str(CALCULATOR["calculate"](**json.loads(call.function.arguments)))
    except (TypeError, ValueError) as error:
        return str({"error": str(error)})


async def agent(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
    """Answers a question with the help of a calculator; returns 1.0 if the answer is right."""
    import openai

    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=600
    ) as client:
        while True:
            try:
                made = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=TOOLS
                )
            except openai.BadRequestError:  # no room is left for another turn
                return 0.0
            message = made.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": result_of(call)}
                for call in message.tool_calls
            ]
    numbers = re.findall(r"-?\d+", message.content or "")
    return float(numbers[-1:] == [row["answer"]])


def main(cfg: AgentConfig) -> None:
    """Train an agent that is written against OpenAI's client, with GRPO."""
    problems = CALCULATOR["problems"]
    trainer = GRPOTrainer(
        cfg,
        harness=agent,
        train_data=list(islice(problems(), 4096)),
        eval_data=list(islice(problems(heldout=True), 256)),
    )
    before = trainer.evaluate(temperature=1.0).accuracy
    result = trainer.fit()
    after = trainer.evaluate(temperature=1.0).accuracy
    if is_main():
        print(f"accuracy before: {before:.3f}, after: {after:.3f}, in {result.seconds:.0f} s")


if __name__ == "__main__":
    cli.run(main)
