"""Writes `goldens/`: inputs of the objective, and what TRL or the papers make of them.

Run it as `python tests/objective/make_goldens.py`; it needs the `parity` extra.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from trl_reference import Reference, paper_loss, trl_has, trl_loss, trl_policy_mask

from grpo_eqx.objective import Objective

FOLDER = Path(__file__).parent / "goldens"
SHAPE = (2, 3, 5)
TOP_ENTROPY_QUANTILE = 0.4
MARGIN = 1e-3
"""No quantity is nearer than this to a threshold: float32 and float64 are on one side of it."""

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
CLIPPED = LOSS_TYPES[:4]
LEVELS = ("token", "sequence", "sequence_token")
MODES = (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
KLS: dict[str, dict[str, Any]] = {
    "no_kl": {"beta": 0.0},
    **{
        name + ("_unbiased" if unbiased else ""): {**kl, "use_bias_correction_kl": unbiased}
        for name, kl in {
            "k1": {"kl_estimator": "k1"},
            "k2": {"kl_estimator": "k2"},
            "k3": {"kl_estimator": "k3"},
            "k3_clamp": {"kl_estimator": "k3", "kl_clamp": 0.08},
        }.items()
        for unbiased in (False, True)
    },
}
COMMON = Objective(
    epsilon=0.2,
    epsilon_high=0.28,
    sapo_temperature_pos=0.8,
    sapo_temperature_neg=1.3,
    beta=0.1,
    importance_sampling_clip_min=0.6,
    importance_sampling_clip_max=1.5,
    max_completion_length=7,
)
CISPO_CAP = 1.3
CAP = 1.6
"""`delta` and `dual_clip`."""
DRIFT = 0.4
"""`off_policy_mask_threshold`."""
SHARES = (2, 4)
"""Updates on a rollout, where it has several."""


class Case(NamedTuple):
    name: str
    objective: Objective
    batch: dict[str, str | None]
    """Names of the inputs that are not those of `TokenBatch`'s fields; `None` for no input."""


def make_case(name: str, batch: dict[str, str | None] | None = None, **fields: Any) -> Case:
    if fields["loss_type"] == "cispo":
        fields = {"epsilon_high": CISPO_CAP, **fields}
    named = (fields["loss_type"], fields["importance_sampling_level"], name)
    return Case("-".join(named), dataclasses.replace(COMMON, **fields), batch or {})


def product() -> Iterator[Case]:
    """Every loss at every level with every KL term and every importance weight."""
    for loss, level, kl, mode in itertools.product(LOSS_TYPES, LEVELS, KLS, MODES):
        yield make_case(
            f"{kl}-{mode or 'no_weights'}",
            loss_type=loss,
            importance_sampling_level=level,
            importance_sampling_mode=mode,
            **KLS[kl],
        )


def single_cases() -> Iterator[Case]:
    """What the product leaves out."""
    masked: dict[str, str | None] = {"policy_mask": "policy_mask"}
    on_policy: dict[str, str | None] = {"old_logps": None}
    far: dict[str, str | None] = {"ref_logps": "far_ref_logps"}
    for loss, level in itertools.product(LOSS_TYPES, LEVELS):
        of: dict[str, Any] = {"loss_type": loss, "importance_sampling_level": level}
        if loss in CLIPPED:
            yield make_case("delta", delta=CAP, **of)
            yield make_case("dual_clip", dual_clip=CAP, **of)
        if loss != "sapo":
            yield make_case("epsilon_high", epsilon_high=1.0 if loss == "cispo" else 0.5, **of)
        yield make_case("off_policy_mask", off_policy_mask_threshold=DRIFT, **of)
        yield make_case("policy_mask", masked, **of)
        yield make_case("entropy_bonus", entropy_coef=0.3, **of)
        yield make_case("entropy_bonus-policy_mask", masked, entropy_coef=0.3, **of)
        yield make_case("on_policy", on_policy, **of)
        yield make_case(
            "on_policy-token_mask", on_policy, importance_sampling_mode="token_mask", **of
        )
        yield make_case("k3_far_clamp", far, kl_clamp=10.0, **of)  # verl's own clamp
        yield make_case(
            "no_upper_bound",
            importance_sampling_mode="token_truncate",
            **of,
            importance_sampling_clip_max=None,
        )
        yield make_case(
            "no_lower_bound",
            importance_sampling_mode="sequence_mask",
            **of,
            importance_sampling_clip_min=None,
        )
        yield make_case(
            "everything",
            masked,
            delta=CAP if loss in CLIPPED else None,
            entropy_coef=0.3,
            importance_sampling_mode="token_truncate",
            off_policy_mask_threshold=DRIFT,
            **of,
        )


def make_inputs() -> dict[str, np.ndarray]:
    """Sequences on every side of every threshold, and noise so that tokens are as well."""
    rng = np.random.default_rng(4)  # one that `check_inputs` is content with

    def noise(deviation: float) -> np.ndarray:
        return rng.normal(0, deviation, SHAPE)

    def each(*of_sequences: float) -> np.ndarray:
        return np.array(of_sequences).reshape(*SHAPE[:2], 1)

    mask = np.array(
        [
            [[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [1, 0, 0, 0, 0]],
            [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]],
        ],
        bool,
    )
    logps = rng.normal(-2, 1, SHAPE)
    old_logps = logps - each(0.65, -0.5, 0.6, 0.02, 0.3, -0.45) - noise(0.35)
    sampler_logps = old_logps - each(0.2, -0.3, 0.2, -0.05, 0.1, 0.1) - noise(0.35)
    ref_logps = logps - noise(0.6)
    inputs = {
        "logps": logps,
        "entropies": rng.uniform(0, 2, SHAPE),
        "sampler_logps": sampler_logps,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
        # Differences beyond the 20 that verl bounds the exponent to, both ways.
        "far_ref_logps": ref_logps + each(23.0, 0, 0, -24.0, 0, 0) * (rng.random(SHAPE) < 0.5),
    }
    # What stands where the mask is False must not matter.
    inputs = {
        name: np.where(mask, x, rng.normal(-5, 3, SHAPE)).astype(np.float32)
        for name, x in inputs.items()
    }
    inputs["entropies"] = np.abs(inputs["entropies"])
    inputs |= {
        "advantages": np.array([[-0.9, -0.7, 1.3], [0.8, 1.1, 0.6]], np.float32),
        "mask": mask,
    }
    return inputs


def check_inputs(inputs: dict[str, np.ndarray]) -> None:
    """Every threshold has tokens, or sequences, well away from it on both sides."""
    x = {name: array.astype(np.float64) for name, array in inputs.items()}
    mask, advantages = inputs["mask"], np.broadcast_to(x["advantages"][..., None], SHAPE)
    present = mask.any(axis=-1)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.where(mask, values, 0).sum(-1) / np.maximum(mask.sum(-1), 1)

    def both_sides(name: str, values: np.ndarray, threshold: float) -> None:
        assert (values > threshold).any(), name
        assert (values < threshold).any(), name
        assert np.abs(values - threshold).min() > MARGIN, name

    log_ratio, rho = x["logps"] - x["old_logps"], x["old_logps"] - x["sampler_logps"]
    for level, ratios, signs in (
        ("token", np.exp(log_ratio[mask]), advantages[mask]),
        ("sequence", np.exp(mean(log_ratio)[present]), x["advantages"][present]),
    ):
        for sign in (-1, 1):
            of_sign = ratios[signs * sign > 0]
            both_sides(f"{level} low {sign}", of_sign, 0.8)
            both_sides(f"{level} high {sign}", of_sign, 1.28)
        both_sides(f"{level} cap", ratios[signs < 0], CAP)
        both_sides(f"{level} epsilon_high", ratios[signs > 0], 1.5)
        both_sides(f"{level} cispo", ratios, CISPO_CAP)
        both_sides(f"{level} cispo at 1", ratios, 1.0)
    of_sequences = (mean(rho) * mask.sum(-1))[present]
    on_policy = np.exp((x["logps"] - x["sampler_logps"])[mask])
    for threshold in (0.6, 1.5):
        both_sides("token weights", np.exp(rho[mask]), threshold)
        both_sides("on-policy weights", on_policy, threshold)
        both_sides("sequence weights", np.exp(of_sequences), threshold)
    both_sides("drift", mean(x["sampler_logps"] - x["logps"])[x["advantages"] < 0], DRIFT)
    to_ref = (x["ref_logps"] - x["logps"])[mask]
    both_sides("clamp", np.exp(to_ref) - 1 - to_ref, 0.08)
    both_sides("exponent", (x["far_ref_logps"] - x["logps"])[mask], 20)
    both_sides("exponent", (x["far_ref_logps"] - x["logps"])[mask], -20)
    acting = inputs["policy_mask"][mask]
    assert acting.any()
    assert not acting.all()


def batch_of(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a case by `TokenBatch`'s fields."""
    fields = ("logps", "entropies", "sampler_logps", "advantages", "mask", "old_logps", "ref_logps")
    names = {**{field: field for field in fields}, **case.batch}
    return {field: inputs[name] for field, name in names.items() if name is not None}


def golden(case: Case, inputs: dict[str, np.ndarray]) -> Reference:
    """TRL's values where it has all of the case, and then the papers' must be the same."""
    batch = batch_of(case, inputs)
    papers = paper_loss(case.objective, batch)
    if not trl_has(case.objective):
        return papers
    quantile = TOP_ENTROPY_QUANTILE if batch.pop("policy_mask", None) is not None else 1.0
    trl = trl_loss(case.objective, batch, top_entropy_quantile=quantile)
    # TRL's temperatures are float32.
    tolerance = 1e-7 if case.objective.loss_type == "sapo" else 1e-12
    for theirs, of_papers in zip(trl[:3], papers[:3], strict=True):
        np.testing.assert_allclose(of_papers, theirs, 0, tolerance, err_msg=case.name)
    return trl


def make_share_inputs() -> dict[str, np.ndarray]:
    """Four prompts whose completions differ much in length."""
    rng = np.random.default_rng(5)
    shape = (4, 2, 6)
    lengths = np.array([[6, 5], [1, 2], [6, 6], [0, 4]])
    logps = rng.normal(-2, 1, shape)
    old_logps = logps - rng.normal(0, 0.3, shape)
    inputs = {
        "logps": logps,
        "entropies": rng.uniform(0, 2, shape),
        "sampler_logps": old_logps,
        "old_logps": old_logps,
        "ref_logps": logps - rng.normal(0, 0.5, shape),
        "advantages": rng.normal(0, 1, shape[:2]),
    }
    mask = np.arange(shape[-1]) < lengths[..., None]
    return {name: x.astype(np.float32) for name, x in inputs.items()} | {"mask": mask}


def write_share_goldens() -> None:
    """What TRL makes of every loss on shares of a rollout, an update each.

    By share, every second or fourth prompt; gradients lie where their prompts are.
    """
    inputs = make_share_inputs()
    cases, losses, gradients = [], [], []
    for loss, num_shares in itertools.product(LOSS_TYPES, SHARES):
        objective = make_case("shares", loss_type=loss, importance_sampling_level="token").objective
        of_shares, gradient = [], np.zeros(inputs["logps"].shape)
        for index in range(num_shares):
            share = {name: x[index::num_shares] for name, x in inputs.items()}
            reference = trl_loss(
                objective, share, num_shares=num_shares, rollout_tokens=int(inputs["mask"].sum())
            )
            of_shares.append(reference.loss)
            gradient[index::num_shares] = reference.logps_gradient
        cases.append(
            json.dumps({"num_shares": num_shares, "objective": dataclasses.asdict(objective)})
        )
        losses.append(of_shares + [np.nan] * (max(SHARES) - num_shares))
        gradients.append(gradient)
    np.savez_compressed(
        FOLDER / "shares.npz",
        cases=np.array(cases, np.bytes_),
        losses=np.array(losses),
        logps_gradients=np.array(gradients),
        **inputs,
    )


def main() -> None:
    write_share_goldens()
    inputs = make_inputs()
    inputs["policy_mask"] = trl_policy_mask(inputs, TOP_ENTROPY_QUANTILE)
    check_inputs(inputs)
    cases = [*product(), *single_cases()]
    assert len({case.name for case in cases}) == len(cases)
    references = [golden(case, inputs) for case in cases]
    described = [
        json.dumps(
            {
                "name": case.name,
                "reference": "TRL" if trl_has(case.objective) else "papers",
                "objective": dataclasses.asdict(case.objective),
                "batch": case.batch,
            }
        )
        for case in cases
    ]
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "inputs.npz", **inputs)
    np.savez_compressed(
        FOLDER / "goldens.npz",
        cases=np.array(described, np.bytes_),
        losses=np.array([reference.loss for reference in references]),
        logps_gradients=np.array([r.logps_gradient for r in references], np.float32),
        entropies_gradients=np.array([r.entropies_gradient for r in references], np.float32),
    )
    of_trl = sum(trl_has(case.objective) for case in cases)
    print(f"{len(cases)} cases: {of_trl} from TRL, {len(cases) - of_trl} from the papers")
    for path in sorted(FOLDER.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
