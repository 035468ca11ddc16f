"""Makes mistakes, one after another, and says what each prints and exits with.

Rows come as JSON on standard input: commands are lines as they are typed, scripts the body of a
`main` as `cli.run` calls it. They find here what they need: a small model, data, and folders with
something wrong in them. A process of its own, since tests check types of arguments before we do.
"""

import contextlib
import io
import json
import shlex
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np  # noqa: F401 -- rows of the table use it

from grpo_eqx import (
    GRPOConfig,
    GRPOTrainer,
    cli,
    data,
    loss_backends,
    models,
    recipes,
    rewards,
    sharding,
)
from grpo_eqx.cli.main import main as command_main
from grpo_eqx.tracking import Tracker  # noqa: F401 -- rows of the table use it

HERE = Path(tempfile.mkdtemp())
MODEL = Path(sys.argv[1])
RUN = HERE / "finished"
"""Folder of a run."""
for part in ("checkpoints", "model"):
    (RUN / part).mkdir(parents=True)
(RUN / "metrics.jsonl").touch()
(HERE / "link").symlink_to("nowhere")
DATA = HERE / "problems.jsonl"
DATA.write_text("".join(f'{{"question": "{i} + {i}?", "answer": {2 * i}}}\n' for i in range(40)))
ROWS = [{"question": f"{i} + {i}?", "answer": 2 * i} for i in range(40)]
Dataset = datasets.Dataset
TALK = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
"""Template that refuses system messages, as Gemma's does."""


def file(name: str, content: str | bytes) -> str:
    """Writes a file, and returns its path."""
    path = HERE / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def model(
    *,
    without: str = "",
    weights: str = "",
    tokenizer: str = "",
    adapter: bool = False,
    **fields: Any,
) -> str:
    """Copies the model without files of some name, and with other fields in its config.json.

    Its weights and tokenizer can be replaced by a text; weights can be those of an adapter.
    """
    folder = Path(tempfile.mkdtemp(dir=HERE)) / "model"
    shutil.copytree(MODEL, folder)
    if without:
        for path in folder.glob(without):
            path.unlink()
    if adapter:
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        fields_of_adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(
            json.dumps({**fields_of_adapter, "base_model_name_or_path": "tiny_qwen2"})
        )
    if weights:
        (folder / "model.safetensors").write_text(weights)
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer)
    config = folder / "config.json"
    if config.exists():
        config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return str(folder)


def trainer(**arguments: Any) -> GRPOTrainer:
    """Makes a trainer of the small model on forty problems, but for what is passed."""
    settings = {"model": str(MODEL), "max_completion_length": 8, "output_dir": str(HERE / "run")}
    names = GRPOConfig.__dataclass_fields__.keys() - {"model", "reward_funcs", "eval_data"}
    settings |= {name: arguments.pop(name) for name in list(arguments) if name in names}
    return GRPOTrainer(GRPOConfig(**settings), **{"train_data": ROWS, **arguments})


def run_script(text: str) -> None:
    """Runs the body of a script's `main`."""
    of_package = {
        "GRPOConfig": GRPOConfig,
        "GRPOTrainer": GRPOTrainer,
        "recipes": recipes,
        "data": data,
        "models": models,
        "rewards": rewards,
        "sharding": sharding,
        "loss_backends": loss_backends,
    }
    scope = {**globals(), **of_package}
    sys.argv = ["train.py"]
    cli.run(lambda _: exec(text, scope))


def run_command(text: str) -> None:
    """Runs a line as it is typed after grpo-eqx."""
    names = {"DATA": DATA, "MODEL": MODEL, "HERE": HERE, "RUN": RUN}
    sys.argv = ["grpo-eqx", *shlex.split(text.format(**names))]
    command_main()


def outcome(kind: str, text: str) -> tuple[int, str]:
    """Returns the exit code, and all that is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            (run_script if kind == "script" else run_command)(text)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc(file=printed)
            code = -1
    return code, printed.getvalue()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    rows = json.load(sys.stdin)
    results = [outcome(kind, text) for kind, text in rows]
    shutil.rmtree(HERE)
    print(json.dumps(results), file=sys.__stdout__)
