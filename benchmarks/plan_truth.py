r"""Whether a plan is true: its peak, and the memory that the same run takes on this machine.

    JAX_PLATFORMS=cpu python benchmarks/plan_truth.py                  # one device, about 1.5 GB
    JAX_PLATFORMS=cpu python benchmarks/plan_truth.py --hidden-size 512 --json truth.json

On CPUs, what is measured is the growth of a process' resident memory, from before its trainer is
made to the highest during training. The process has trained the same before, and dropped it: so
libraries, the tokenizer and compiled programs, which a plan does not count, are in it already, and
their size is shown too. On GPUs it is the allocator's highest. The model is random and has the
embedded one's tokenizer. A plan is the same for completions of any length: by default few end
early, and with `--mean-length` most do.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro

GiB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTruth:
    """A run to plan and to train."""

    hidden_size: int = 768
    """Of the random model; everything else follows from it."""
    num_hidden_layers: int = 8
    """Its layers."""
    prompts_per_step: int = 8
    """Prompts of a step, with 8 completions each."""
    max_completion_length: int = 64
    """Tokens that a completion has at most."""
    mean_length: int | None = None
    """Tokens after which a completion ends, on average, if nothing stops it before. None: as many
    as the vocabulary has."""
    micro_batch_size_per_device: int | None = None
    """As for training."""
    steps: int = 2
    """Training steps."""
    json: Path | None = None
    """File for the figures."""


def main(work: PlanTruth) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        asked = json.dumps({**dataclasses.asdict(work), "json": None, "folder": folder})

        def child(part: str) -> Any:
            command = [sys.executable, __file__, part, asked]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            return json.loads(done.stdout.splitlines()[-1])

        child("make")
        figures = {**child("plan"), **child("train"), "work": dataclasses.asdict(work)}
    show(figures)
    if work.json is not None:
        work.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")


def show(figures: dict[str, Any]) -> None:
    planned, measured = figures["planned_bytes"], figures["measured_bytes"]
    print(f"{figures['parameters'] / 1e6:.1f} M parameters on {figures['device_kind']}")
    print(f"planned peak   {planned / GiB:.3f} GiB, in {figures['program']}")
    own = figures["process_bytes"] / GiB
    print(f"measured       {measured / GiB:.3f} GiB, in a process that had {own:.3f} GiB")
    print(f"measured over planned: {measured / planned:.3f}")


def config(asked: dict[str, Any]) -> Any:
    """The run's."""
    from grpo_eqx import GRPOConfig

    folder = Path(asked["folder"])
    own = ("prompts_per_step", "max_completion_length", "micro_batch_size_per_device", "steps")
    settings = {name: asked[name] for name in own}
    return GRPOConfig(
        model=str(folder / "model"), output_dir=folder / "run", resume="never", eval_problems=64,
        **settings,
    )  # fmt: skip


def make(asked: dict[str, Any]) -> int:
    """Writes the model."""
    import equinox as eqx
    import jax

    from grpo_eqx.common.random_keys import make_key
    from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
    from grpo_eqx.models.pretrained import model_folder, save_pretrained

    embedded, folder = model_folder("tiny_qwen2"), Path(asked["folder"]) / "model"
    vocab_size = Qwen2Config.from_json(embedded / "config.json").vocab_size
    size = asked["hidden_size"]
    model = Qwen2.init(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=size,
            intermediate_size=4 * size,
            num_hidden_layers=asked["num_hidden_layers"],
            num_attention_heads=size // 64,
            num_key_value_heads=max(1, size // 256),
        ),
        make_key(0),
    )
    # All logits are equal then: any token is as likely to end a completion.
    save_pretrained(eqx.tree_at(lambda m: m.norm, model, model.norm * 0), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((embedded / name).read_bytes())
    if asked["mean_length"] is not None:
        ends = {"eos_token_id": list(range(2, vocab_size, asked["mean_length"])), "pad_token_id": 0}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    return sum(x.size for x in jax.tree.leaves(model))


def plan(asked: dict[str, Any]) -> dict[str, Any]:
    """What is planned."""
    from grpo_eqx.planner.devices import find_target
    from grpo_eqx.planner.plan_run import plan_run
    from grpo_eqx.run.spec import RunSpec

    found = plan_run(RunSpec.describe(config(asked)), find_target("local"), lambda _: None)
    return {
        "planned_bytes": found.peak_bytes,
        "program": max(found.training, key=lambda name: found.training[name].peak_bytes),
        "device_kind": found.device_kind,
        "parameters": found.resident["parameters"] // 4,
    }


def train(asked: dict[str, Any]) -> dict[str, int]:
    """Bytes that training took at most, and those of the process without it."""
    import jax

    from grpo_eqx import GRPOTrainer

    GRPOTrainer(config(asked)).fit()
    gc.collect()
    before = resident_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the highest so far, VmHWM, is the present
    GRPOTrainer(config(asked)).fit()
    grown = resident_bytes("VmHWM") - before
    stats = jax.devices()[0].memory_stats() or {}
    return {"measured_bytes": stats.get("peak_bytes_in_use", grown), "process_bytes": before}


def resident_bytes(name: str) -> int:
    """A figure of this process, as the kernel has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


if __name__ == "__main__":
    parts = {"make": make, "plan": plan, "train": train}
    if sys.argv[1:] and sys.argv[1] in parts:
        print(json.dumps(parts[sys.argv[1]](json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(PlanTruth, description=__doc__))
