"""Learning from a rollout: its rows, the passes of other policies over them, and its updates."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Array, Bool, Float

from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.run.spec import Passes
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.arrays import fetch
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.row_shape import RowShape
from grpo_eqx.training.rows import Rows, by_token, of_each, pack, with_loss
from grpo_eqx.training.scorer import Scorer
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.updater import Updater

_T = TypeVar("_T")


class _Packed(NamedTuple):
    """Groups of a rollout, in rows."""

    groups: slice
    packing: Packing
    rows: Rows


class Learner:
    """The updates of a step: `num_iterations` passes over the shares of its rollout.

    A share is every n-th group of `steps_per_generation`: one update of each pass learns from it.
    `begin` comes before `learn`, so that devices score a rollout while it is being rewarded.
    """

    def __init__(
        self,
        scorer: Scorer,
        updater: Updater,
        shape: RowShape,
        share_shape: RowShape,
        cfg: GRPOConfig,
        passes: Passes,
    ):
        """**Arguments:**

        - `scorer`, `updater`: the device programs.
        - `shape`, `share_shape`: the shapes of the rows of a rollout, and of a share of it.
        - `cfg`: the resolved settings.
        - `passes`: the forward passes that a step makes besides those of its updates.
        """
        self._scorer, self._updater = scorer, updater
        self._shape, self._share_shape = shape, share_shape
        self._cfg, self._passes = cfg, passes
        self._shares: list[_Packed] = []
        self.num_counted = 0
        """Tokens of the last rollout that the loss counts."""

    @phase("score")
    def begin(self, state: TrainState, rollout: Rollout) -> None:
        """Packs a rollout, and starts the passes over it that come before its updates."""
        number = self._cfg.steps_per_generation
        self._shares = [
            self._packed(rollout, slice(share, None, number), self._share_shape)
            for share in range(number)
        ]
        # Scored whole, as that fills rows best. A single share is the whole, in the same rows.
        whole = self._shares[0]
        if number > 1 and (self._passes.old_policy or self._passes.reference):
            whole = self._packed(rollout, slice(None), self._shape)
        self._packing, self._scores = whole.packing, dict[str, Array]()
        if self._passes.old_policy:
            scores = self._scorer(state.model, whole.rows, rollout.routes)
            self._scores["old_logps"] = scores.logps
        reference = state.reference_model if self._passes.reference else None
        if reference is not None:
            scores = self._scorer(reference, whole.rows, is_reference=True)
            self._scores["ref_logps"] = scores.logps

    @phase("update")
    def learn(
        self, state: TrainState, rollout: Rollout, advantages: Float[np.ndarray, "P G"]
    ) -> tuple[TrainState, list[dict[str, Array]]]:
        """Makes all updates of a step.

        **Arguments:**

        - `state`: the state before the step.
        - `rollout`: the one that `begin` had, rewarded.
        - `advantages`: those of its completions.

        **Returns:** the state after the updates, and the metrics of each, which the devices may
        still be computing.
        """
        shares, metrics = self._with_loss(rollout, advantages), []
        for _ in range(self._cfg.num_iterations):
            for share in shares:
                rows = share
                if self._passes.entropies:
                    entropies = self._scorer(state.model, rows, rollout.routes).entropies
                    rows = dataclasses.replace(rows, entropies=entropies)
                state, update_metrics = self._updater(state, rows, rollout.routes)
                metrics.append(update_metrics)
        return state, metrics

    def packing_metrics(self) -> dict[str, float]:
        """Returns the share of padding in the updates' rows, and how evenly devices share them."""
        packings = [share.packing for share in self._shares]
        return {
            "perf/padding_share": fmean(packing.padding_share for packing in packings),
            "perf/balance": fmean(packing.balance for packing in packings),
        }

    def _packed(self, rollout: Rollout, groups: slice, shape: RowShape) -> _Packed:
        packing = Packing.plan(rollout.prompt_lengths[groups], rollout.lengths[groups], shape)
        numbers = None if rollout.routes is None else range(len(rollout.groups))[groups]
        rows = pack(rollout.groups[groups], packing, self._scorer.forward.mesh, numbers)
        return _Packed(groups, packing, rows)

    def _with_loss(self, rollout: Rollout, advantages: Float[np.ndarray, "P G"]) -> list[Rows]:
        """Returns the rows of each share with what the loss reads."""
        counts = self._counts(rollout)
        self.num_counted = int(rollout.num_written[counts].sum())
        per_update = max(self.num_counted, 1) / len(self._shares)
        scores = None
        if len(self._shares) > 1:
            scores = {name: of_each(fetch(x), self._packing) for name, x in self._scores.items()}
        ready, mesh = [], self._scorer.forward.mesh
        for share in self._shares:
            written = [
                each.written & counts[p, g]
                for p in range(len(rollout.groups))[share.groups]
                for g, each in enumerate(rollout.groups[p])
            ]
            own = self._scores
            if scores is not None:
                own = {
                    name: by_token(_own(values, share.groups, counts.shape), share.packing, mesh)
                    for name, values in scores.items()
                }
            rows = with_loss(
                share.rows, share.packing, mesh, written,
                advantages[share.groups].reshape(-1), per_update, **own,
            )  # fmt: skip
            ready.append(rows)
        return ready

    def _counts(self, rollout: Rollout) -> Bool[np.ndarray, "P G"]:
        """Returns True for completions that the loss counts."""
        assert rollout.rewards is not None
        kept = ~rollout.rewards.dropped
        return kept & rollout.finished if self._cfg.mask_truncated_completions else kept


def _own(values: Sequence[_T], groups: slice, shape: tuple[int, ...]) -> list[_T]:
    """Returns the values of some groups, of those of all completions `[P * G]`."""
    P, G = shape
    return [values[p * G + g] for p in range(P)[groups] for g in range(G)]
