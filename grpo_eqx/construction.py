"""The objects that a config names, made and checked before anything is trained."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_eqx.config import GRPOConfig
from grpo_eqx.data.batches import TokenizedPrompts
from grpo_eqx.data.load import load_data
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.errors import RewardError, UserError
from grpo_eqx.generation import Stopping
from grpo_eqx.models.base import CausalLM, ModelConfig
from grpo_eqx.models.pretrained import from_pretrained, model_folder
from grpo_eqx.models.registry import read_config
from grpo_eqx.rewards import (
    SOFT_OVERLONG,
    RewardFunc,
    RewardRunner,
    gsm8k,
    reward_func,
    soft_overlong_punishment,
)
from grpo_eqx.rewards.runner import func_name
from grpo_eqx.sharding.arrays import fetch, place


def reward_runner(cfg: GRPOConfig, funcs: Sequence[RewardFunc] | None) -> RewardRunner:
    """The given reward functions, or those that the config names, and its penalty."""
    if funcs is None:
        pairs = [(name, reward_func(name)) for name in cfg.reward_funcs]
    else:
        pairs = [(func_name(func), func) for func in funcs]
    penalised = cfg.overlong_buffer > 0
    names = [name for name, _ in pairs] + [SOFT_OVERLONG] * penalised
    if len(set(names)) < len(names):
        raise UserError("two reward functions have the same name: give each its own.")
    runner = RewardRunner(dict(pairs), cfg.reward_weights)
    if not penalised:
        return runner
    assert cfg.max_completion_length is not None  # resolved
    buffer = max(1, round(cfg.overlong_buffer * cfg.max_completion_length))
    penalty = soft_overlong_punishment(cfg.max_completion_length, buffer)
    return runner.with_penalty(SOFT_OVERLONG, penalty)


class Inputs(NamedTuple):
    """What a run reads besides the model's weights."""

    tokenizer: ChatTokenizer
    train: TokenizedPrompts
    heldout: TokenizedPrompts

    def check_belong_to(self, model: ModelConfig, cfg: GRPOConfig) -> None:
        """Refuses a tokenizer that the model cannot have, and prompts that it has no room for."""
        self.tokenizer.check_belongs_to(model.vocab_size)
        for problems in (self.train, self.heldout):
            longest = max(map(len, problems.tokens))
            check_positions(cfg, model, f"the longest prompt of {problems.name}", longest)

    def fingerprints(self) -> dict[str, str]:
        """By which processes tell whether they have read the same."""
        return {
            "the tokenizer": self.tokenizer.fingerprint(),
            "the training problems": self.train.fingerprint(),
            "the held-out problems": self.heldout.fingerprint(),
        }


def load_inputs(
    cfg: GRPOConfig,
    tokenizer: ChatTokenizer | Any | None,
    train_data: PromptSource | None,
    eval_data: PromptSource | None,
) -> Inputs:
    """What is given, and for the rest what the config names."""
    if train_data is None or eval_data is None:
        train_data, eval_data = load_data(cfg.data, cfg.eval_data, cfg.eval_problems)
    tokenizer = chat_tokenizer(cfg, tokenizer)
    return Inputs(
        tokenizer,
        tokenize(cfg, train_data, len(train_data), tokenizer),
        tokenize(cfg, eval_data, cfg.eval_problems, tokenizer),
    )


def tokenize(
    cfg: GRPOConfig, source: PromptSource, count: int, tokenizer: ChatTokenizer
) -> TokenizedPrompts:
    """The first `count` problems of a source (all, where it has fewer)."""
    prompts = [source[i] for i in range(min(count, len(source)))]
    return TokenizedPrompts(
        source.name,
        prompts,
        tokenizer,
        max_length=cfg.max_prompt_length,
        overlong=cfg.overlong_prompts,
    )


def chat_tokenizer(cfg: GRPOConfig, given: ChatTokenizer | Any | None) -> ChatTokenizer:
    """The given tokenizer, or that of the model that the config names."""
    if given is None:
        return ChatTokenizer.from_pretrained(model_folder(cfg.model), cfg.system_prompt)
    if isinstance(given, ChatTokenizer):
        return given
    return ChatTokenizer(given, system_prompt=cfg.system_prompt)


def architecture(cfg: GRPOConfig, given: CausalLM | None) -> ModelConfig:
    """That of the given model, or of the one that the config names."""
    if given is not None:
        return given.config
    return read_config(model_folder(cfg.model) / "config.json")


def check_positions(cfg: GRPOConfig, model: ModelConfig, prompt: str, length: int) -> None:
    """Refuses a prompt that leaves the model too few positions for a completion.

    **Arguments:** what to call the prompt in the message, and its length in tokens.
    """
    limit, longest = model.max_position_embeddings, cfg.max_completion_length
    assert longest is not None  # resolved
    room = limit - longest
    if length <= room:
        return
    shorter = f", or keep prompts to {room} tokens (max_prompt_length, overlong_prompts)"
    raise UserError(
        f"{prompt} has {length} tokens and max_completion_length is {longest}, together more than "
        f"the {limit} positions of the model (max_position_embeddings): lower "
        f"max_completion_length{shorter if room > 0 else ''}."
    )


def placed_model(cfg: GRPOConfig, given: CausalLM | None, mesh: jax.sharding.Mesh) -> CausalLM:
    """Float32 parameters on the mesh: a copy of the given model, or the one the config names."""
    if given is None:
        return from_pretrained(cfg.model, mesh)
    # A copy even where the model is in place already: updates will be written over it.
    model = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), given)
    shardings = given.shardings(mesh)
    if jax.process_count() > 1:
        return jax.tree.map(place, fetch(model), shardings)
    return jax.device_put(model, shardings)


def check_answers(prompts: Sequence[Prompt]) -> None:
    """Refuses problems that `gsm8k.correct` cannot score, before anything is generated."""
    for prompt in prompts:
        if "answer" not in prompt.columns:
            raise UserError(
                "the problems have no column 'answer' to compare with: bring one, or pass "
                "reward_funcs and eval_func of your own."
            )
        try:
            gsm8k.gold_number(prompt.columns["answer"])
        except RewardError as error:
            raise UserError(f"the problem {prompt.text[:40]!r}...: {error}") from error


def stopping(cfg: GRPOConfig, tokenizer: ChatTokenizer, vocab_size: int) -> Stopping:
    """What ends a completion."""
    if not cfg.stop_strings:
        return Stopping.of_ids(tokenizer.eos_ids, vocab_size)
    for string in cfg.stop_strings:
        if special := [t for t in tokenizer.tokenizer.all_special_tokens if t in string]:
            raise UserError(
                f"stop string {string!r} contains {special[0]!r}, a special token, which the text "
                f"of completions leaves out: leave it to the tokenizer's end-of-sequence tokens."
            )
    token_bytes = tokenizer.token_bytes(vocab_size)
    return Stopping.of_strings(tokenizer.eos_ids, cfg.stop_strings, token_bytes)
