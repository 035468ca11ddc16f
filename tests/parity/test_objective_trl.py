"""The objective and the advantages here and in TRL, on random inputs."""

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from grpo_eqx.objective import Metrics, Objective, TokenBatch, Totals, compute_advantages
from grpo_eqx.rewards import Rewards

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
"""Of losses, metrics and advantages, and of gradients as a share of the largest."""
SEEDS = range(3)
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
KLS: dict[str, dict[str, Any]] = {
    "no_kl": {"beta": 0.0},
    "k3": {"use_bias_correction_kl": False},
    "k3_unbiased": {},
}
NOT_IN_TRL: dict[str, dict[str, Any]] = {
    "k1": {"kl_estimator": "k1", "use_bias_correction_kl": False},
    "k1_unbiased": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2", "use_bias_correction_kl": False},
    "k2_unbiased": {"kl_estimator": "k2"},
    "clamp": {"kl_clamp": 0.1, "use_bias_correction_kl": False},
    "clamp_unbiased": {"kl_clamp": 0.1},
    "dual_clip": {"dual_clip": 1.5},
}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
WITH_EVERYTHING = {
    "delta": 1.5,
    "entropy_coef": 0.1,
    "importance_sampling_mode": "token_truncate",
    "off_policy_mask_threshold": 0.1,
}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = Path(__file__).parents[1] / "objective" / "trl_reference.py"
    spec = importlib.util.spec_from_file_location("trl_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_inputs(seed: int) -> dict[str, np.ndarray]:
    """Ragged completions, of which one is a single token and one has none that counts."""
    rng = np.random.default_rng(seed)
    P, G, Tc = (int(n) for n in rng.integers((2, 3, 4), (5, 6, 10)))
    lengths = rng.integers(1, Tc + 1, (P, G, 1))
    lengths[0, 0], lengths[-1, 0], lengths[-1, -1] = 0, 1, Tc
    mask = np.arange(Tc) < lengths
    mask[-1, -1, 1] = False  # as between the turns of a conversation
    logps = rng.normal(-2, 1, mask.shape)
    old_logps = logps - rng.normal(0, 0.3, mask.shape) - rng.normal(0, 0.4, (P, G, 1))
    sampler_logps = old_logps - rng.normal(0, 0.3, mask.shape)
    inputs = {
        "logps": logps,
        "entropies": rng.uniform(0, 2, mask.shape),
        "sampler_logps": sampler_logps,
        "old_logps": old_logps,
        "ref_logps": logps - rng.normal(0, 0.5, mask.shape),
        "advantages": rng.normal(0, 1, (P, G)),
    }
    inputs["advantages"][0, 1] = 0
    return {"mask": mask, **{name: x.astype(np.float32) for name, x in inputs.items()}}


def make_objective(loss_type: str, level: str, **fields: Any) -> Objective:
    common = Objective(
        epsilon=0.2,
        epsilon_high=0.28,
        sapo_temperature_pos=0.8,
        sapo_temperature_neg=1.3,
        beta=0.1,
        importance_sampling_clip_min=0.6,
        importance_sampling_clip_max=1.5,
        max_completion_length=11,
    )
    fields = {"loss_type": loss_type, "importance_sampling_level": level, **fields}
    if loss_type == "cispo":
        fields = {"epsilon_high": 1.2, **fields}
    if loss_type in ("cispo", "sapo"):
        fields |= {"delta": None, "dual_clip": None}
    return dataclasses.replace(common, **fields)


def run_ours(
    objective: Objective, inputs: dict[str, np.ndarray]
) -> tuple[Float[Array, ""], tuple[Array, Array], dict[str, Array]]:
    """Loss, gradients with respect to log-probs and entropies, and metrics."""
    batch = TokenBatch(**{name: jnp.asarray(x) for name, x in inputs.items()})
    policy_mask = batch.mask if batch.policy_mask is None else batch.policy_mask
    totals = Totals.of(batch.mask, policy_mask)

    def loss(logps: Array, entropies: Array) -> tuple[Float[Array, ""], Metrics]:
        return objective(batch._replace(logps=logps, entropies=entropies), totals)

    (value, metrics), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        batch.logps, batch.entropies
    )
    return value, gradients, metrics.values()


def assert_same(objective: Objective, inputs: dict[str, np.ndarray], theirs: Any) -> None:
    value, gradients, metrics = run_ours(objective, inputs)
    np.testing.assert_allclose(value, theirs.loss, rtol=TOLERANCE, atol=TOLERANCE)
    expected = (theirs.logps_gradient, theirs.entropies_gradient)
    for gradient, of_theirs in zip(gradients, expected, strict=True):
        atol = TOLERANCE * np.abs(of_theirs).max()
        np.testing.assert_allclose(gradient, of_theirs, rtol=0, atol=atol)
    for name, metric in theirs.metrics.items():
        np.testing.assert_allclose(
            metrics[name], metric, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


def run_theirs(
    reference: ModuleType, objective: Objective, inputs: dict[str, np.ndarray], quantile: float = 1
) -> Any:
    """TRL's loss, gradients and metrics; `quantile` is its `top_entropy_quantile`."""
    theirs = reference.trl_loss(objective, inputs, top_entropy_quantile=quantile)
    # Metrics of sequences count those without tokens in TRL, and ours do not.
    filled = inputs["mask"].any(axis=-1)
    inputs = {name: x[filled][None] for name, x in inputs.items()}
    of_filled = reference.trl_loss(objective, inputs, top_entropy_quantile=quantile).metrics
    names = [name for name in of_filled if "clip_ratio" in name or "importance" in name]
    return theirs._replace(metrics=theirs.metrics | {name: of_filled[name] for name in names})


# The objective.


@pytest.mark.grid
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_objective_is_theirs(
    reference: ModuleType, loss_type: str, level: str, kl: str, mode: str | None, seed: int
):
    objective = make_objective(loss_type, level, importance_sampling_mode=mode, **KLS[kl])
    inputs = random_inputs(seed)
    assert_same(objective, inputs, run_theirs(reference, objective, inputs))


@pytest.mark.grid
@pytest.mark.parametrize(
    "fields",
    [
        {"delta": 1.5},
        {"off_policy_mask_threshold": 0.1},
        {"entropy_coef": 0.1, "beta": 0.0},
        WITH_EVERYTHING,
    ],
    ids=["delta", "off_policy_mask", "entropy_bonus", "everything"],
)
@pytest.mark.parametrize("quantile", [1.0, 0.3], ids=["all_tokens", "top_entropy"])
@pytest.mark.parametrize("on_policy", [False, True], ids=["off_policy", "on_policy"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_options_are_theirs(
    reference: ModuleType,
    loss_type: str,
    level: str,
    on_policy: bool,
    quantile: float,
    fields: dict[str, Any],
):
    objective, inputs = make_objective(loss_type, level, **fields), random_inputs(seed=3)
    if on_policy:
        del inputs["old_logps"]
    theirs = run_theirs(reference, objective, inputs, quantile)
    if quantile < 1:
        of_tokens = np.where(inputs["mask"], inputs["entropies"], np.nan)
        floor = jnp.nanquantile(of_tokens, 1 - quantile)
        inputs["policy_mask"] = np.asarray(inputs["entropies"] >= floor)
    assert_same(objective, inputs, theirs)


@pytest.mark.grid
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fields", [KLS["k3_unbiased"], WITH_EVERYTHING], ids=["plain", "all"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_papers_formulas_give_what_trl_gives(
    reference: ModuleType, loss_type: str, level: str, fields: dict[str, Any], seed: int
):
    objective, inputs = make_objective(loss_type, level, **fields), random_inputs(seed)
    theirs = reference.trl_loss(objective, inputs)
    papers = reference.paper_loss(objective, inputs)
    for of_papers, expected in zip(papers[:3], theirs[:3], strict=True):
        np.testing.assert_allclose(of_papers, expected, rtol=0, atol=1e-7)


@pytest.mark.grid
@pytest.mark.parametrize("option", NOT_IN_TRL)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_trl_lacks_is_that_of_the_papers(
    reference: ModuleType, loss_type: str, level: str, option: str
):
    objective = make_objective(loss_type, level, **NOT_IN_TRL[option])
    inputs = random_inputs(seed=4)
    assert_same(objective, inputs, reference.paper_loss(objective, inputs))


@pytest.mark.grid
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ratios_of_sequences_with_the_gradients_of_tokens_are_those_of_the_paper(
    reference: ModuleType, loss_type: str, mode: str | None, seed: int
):
    objective = make_objective(loss_type, "sequence_token", importance_sampling_mode=mode)
    inputs = random_inputs(seed)
    assert_same(objective, inputs, reference.paper_loss(objective, inputs))


# Advantages.


def random_rewards(seed: int, num_missing: int) -> Rewards:
    """Three functions' rewards; some are missing, some completions have none, one group's equal."""
    rng = np.random.default_rng(seed)
    P, G = (int(n) for n in rng.integers((4, 3), (7, 6)))
    each = rng.choice([0.0, 0.1, 1.0, 2.5], (3, P, G)) + rng.normal(0, 1, (1, P, G))
    each[:, 0] = np.array([[0.3], [0.1], [0.7]])
    if num_missing:
        each.ravel()[rng.choice(each.size, num_missing, replace=False)] = np.nan
        each[:, 1, 1] = np.nan
        each[:, 2, 1:] = np.nan  # one reward in the group
        each[1, 3] = np.nan  # none of one function's
        each[:, -1] = np.nan if P > 4 else each[:, -1]  # none at all
    weights = (1.0, 0.5, -2.0)
    total = np.nansum(np.array(weights)[:, None, None] * each, axis=0)
    total = np.where(np.isnan(each).all(axis=0), np.nan, total)
    return Rewards(("a", "b", "c"), each, total, weights)


@pytest.fixture(scope="module")
def nanstd() -> Callable[..., Any]:
    """TRL's standard deviation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.utils import nanstd
    return nanstd


def their_advantages(
    rewards: Rewards, scale_rewards: str, aggregation: str, nanstd: Callable[..., Any]
) -> np.ndarray:
    """Formulas of TRL's `_generate_and_score_completions`, for groups of more than one."""
    P, G = rewards.total.shape
    grouped = torch.from_numpy(rewards.each).permute(1, 2, 0)  # [P, G, functions]
    weights = torch.tensor(rewards.weights, dtype=torch.float64)
    missing = torch.isnan(grouped).all(dim=-1).flatten()
    if aggregation == "normalize_then_sum":
        centered = grouped - torch.nanmean(grouped, dim=1, keepdim=True)
        grouped = centered / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    summed = (grouped * weights).nansum(dim=-1).flatten()
    summed[missing] = torch.nan
    by_group = summed.view(P, G)
    if aggregation == "normalize_then_sum":
        advantages = (summed - torch.nanmean(summed)) / (nanstd(summed) + 1e-4)
    else:
        advantages = summed - torch.nanmean(by_group, dim=1).repeat_interleave(G)
        if scale_rewards == "group":
            advantages = advantages / (nanstd(by_group, dim=1).repeat_interleave(G) + 1e-4)
        elif scale_rewards == "batch":
            advantages = advantages / (nanstd(summed) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0).view(P, G).numpy()


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_missing", [0, 1, 12])
@pytest.mark.parametrize(
    ("scale_rewards", "aggregation"),
    [
        ("group", "sum_then_normalize"),
        ("batch", "sum_then_normalize"),
        ("none", "sum_then_normalize"),
        ("group", "normalize_then_sum"),
    ],
)
def test_advantages_are_theirs(
    nanstd: Callable[..., Any], scale_rewards: str, aggregation: str, num_missing: int, seed: int
):
    rewards = random_rewards(seed, num_missing)
    ours = compute_advantages(
        rewards.total, rewards.each, rewards.weights,
        scale_rewards=scale_rewards, aggregation=aggregation,
    )  # fmt: skip
    theirs = their_advantages(rewards, scale_rewards, aggregation, nanstd)
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
