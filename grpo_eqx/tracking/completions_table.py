"""Table of a step's prompts, completions and rewards, as it is recorded."""

import contextlib
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo_eqx.common.durable import write_whole
from grpo_eqx.data.acted import Acted
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ENVIRONMENT, ChatTokenizer
from grpo_eqx.data.trajectory import Group
from grpo_eqx.rewards import Rewards
from grpo_eqx.tracking.checked_parquet import to_parquet

_ID_LENGTH = 12
"""Hex digits of a prompt's id. Among a million prompts, two share an id with a chance of 0.2 %."""
_LOGPS = "token_logps"


def prompt_id(text: str) -> str:
    """Returns a short hash of a prompt's text, the same in every run."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_ID_LENGTH]


def completion_columns(
    step: int,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[str]],
    groups: Sequence[Group],
    rewards: Rewards,
    advantages: Float[np.ndarray, "P G"],
    acted: Acted | None = None,
) -> dict[str, list[Any]]:
    """Returns the columns of a step's table, with an entry for each completion.

    Missing rewards of a function, and advantages of completions without a reward, are NaN. Columns
    that functions have logged come last.

    **Arguments:**

    - `step`: the step.
    - `prompts`, `groups`, `texts`: the prompts, and their completions in tokens and in text.
      Lengths are of the tokens that the model wrote.
    - `rewards`, `advantages`: rewards and advantages of the completions.
    - `acted`: their dialogues, where completions act. Where prompts name their environments, there
      is a column of the names.
    """
    group = advantages.shape[1]
    asked = [prompt.text for prompt in prompts]
    completions = [each for group in groups for each in group]
    return {
        "step": [step] * advantages.size,
        "prompt_id": [id_ for id_ in map(prompt_id, asked) for _ in range(group)],
        "prompt": [text for text in asked for _ in range(group)],
        "completion": [text for of_prompt in texts for text in of_prompt],
        **{
            f"rewards/{name}": each.reshape(-1).tolist()
            for name, each in zip(rewards.names, rewards.each, strict=True)
        },
        "reward": rewards.total.reshape(-1).tolist(),
        "advantage": advantages.reshape(-1).tolist(),
        "length": [int(each.written.sum()) for each in completions],
        "truncated": [not each.is_finished for each in completions],
        **({} if acted is None or not acted.counts.completions else _acts_of(prompts, acted)),
        **({} if rewards.logged is None else rewards.logged.table()),
    }


def _acts_of(prompts: Sequence[Prompt], acted: Acted) -> dict[str, list[Any]]:
    # Not the names of `acted.environments`, which has those of this process alone.
    names = [prompt.columns.get(ENVIRONMENT) for prompt in prompts]
    group = len(acted.each) // len(prompts)
    named = all(isinstance(name, str) for name in names)
    return {
        **({ENVIRONMENT: [name for name in names for _ in range(group)]} if named else {}),
        "tools/turns": [int(each.turns) for each in acted.each],
        "tools/calls": [int(each.calls) for each in acted.each],
        "tools/failures": [int(each.failures) for each in acted.each],
        "tools/lost": acted.lost,
    }


def token_columns(groups: Sequence[Group], tokenizer: ChatTokenizer) -> dict[str, list[Any]]:
    """Returns two more columns, with a list for each completion: its tokens and their log-probs.

    `tokens` has the text of each token, or the name of a special token. `token_logps` has log-probs
    under the distribution that was sampled from, in float32 rounded to float16's 11 bits; NaN for
    tokens that the model did not write.
    """
    completions = [each for group in groups for each in group]
    # One call for all tokens: a call per completion would cost more than its work.
    words = tokenizer.token_texts([token for each in completions for token in each.ids.tolist()])
    logps = np.concatenate(
        [np.where(each.written, each.sampler_logps, np.nan) for each in completions]
    )
    logps = logps.astype(np.float16).astype(np.float32)
    ends = list(itertools.accumulate(map(len, completions)))
    parts = [slice(end - len(each), end) for end, each in zip(ends, completions, strict=True)]
    return {"tokens": [words[part] for part in parts], _LOGPS: [logps[part] for part in parts]}


def write_completions(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes columns as a Parquet file, which appears at its path only once it is complete.

    Does not wait for the disk, because a run may write a table with every step.
    """
    import pyarrow as pa

    table = pa.table(dict(columns))
    leaves = {
        f"{x.name}.list.element" if pa.types.is_list(x.type) else x.name for x in table.schema
    }
    # Rounding leaves two of the four bytes of a log-prob 0: stored as byte streams, they compress
    # to nothing.
    split = {name for name in leaves if name.startswith(_LOGPS)}
    content = to_parquet(
        table, compression="zstd", write_statistics=False, store_schema=False,
        use_dictionary=sorted(leaves - split), use_byte_stream_split=sorted(split),
    )  # fmt: skip
    write_whole(path, content)


def import_writers() -> None:
    """Imports the packages that `write_completions` needs, which takes about a second.

    Import errors are ignored: `write_completions` raises them again.
    """
    with contextlib.suppress(Exception):
        import pyarrow as pa
        import pyarrow.parquet

        pa.array([0])  # imports pandas where it is installed
