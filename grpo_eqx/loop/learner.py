"""Learning from a rollout: its rows, the passes of other policies over them, and its updates."""

import dataclasses
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Array, Bool, Float

from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.run.passes import Passes
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.arrays import fetch
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.rows import Rows, pack, place_tokens, take_tokens, with_loss
from grpo_eqx.training.scorer import Scorer
from grpo_eqx.training.sequences import Sequences, sequences_of
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.updater import Updater

_T = TypeVar("_T")


class _Packed(NamedTuple):
    """Groups of a rollout, in rows."""

    sequences: Sequences
    """Their trajectories, with the numbers of their samples in the rollout."""
    packing: Packing
    rows: Rows


class _Begun(NamedTuple):
    """A rollout that is packed, and being scored."""

    shares: list[_Packed]
    whole: _Packed
    """The whole rollout, in whose rows the scores are."""
    scores: dict[str, Array]
    """Log-probs under other policies, by their field of `Rows`."""


class Learner:
    """The updates of a step: `num_iterations` passes over the shares of its rollout.

    A share is every n-th group of `steps_per_generation`: one update of each pass learns from it.
    `begin` comes before `learn`, so that devices score a rollout while it is being rewarded.
    """

    def __init__(
        self,
        scorer: Scorer,
        updater: Updater,
        rollout_rows: RowShape,
        update_rows: RowShape,
        cfg: GRPOConfig,
        passes: Passes,
    ):
        """**Arguments:**

        - `scorer`, `updater`: the device programs.
        - `rollout_rows`, `update_rows`: the shapes of the rows of a rollout, and of an update.
        - `cfg`: the resolved settings.
        - `passes`: the forward passes that a step makes besides those of its updates.
        """
        self._scorer, self._updater = scorer, updater
        self._rollout_rows, self._update_rows = rollout_rows, update_rows
        self._cfg, self._passes = cfg, passes
        self._begun: _Begun | None = None
        self._packings: list[Packing] = []
        self.num_counted = 0
        """Tokens of the last rollout that the loss counts."""

    @phase("score")
    def begin(self, state: TrainState, rollout: Rollout) -> None:
        """Packs a rollout, and starts the passes over it that come before its updates."""
        number, scores = self._cfg.steps_per_generation, dict[str, Array]()
        shares = [
            self._packed(rollout, slice(share, None, number), self._update_rows)
            for share in range(number)
        ]
        # Scored whole, as that fills rows best. A single share is the whole, in the same rows.
        whole = shares[0]
        if number > 1 and (self._passes.old_policy or self._passes.reference):
            whole = self._packed(rollout, slice(None), self._rollout_rows)
        if self._passes.old_policy:
            scores["old_logps"] = self._scorer(state.model, whole.rows, rollout.routes).logps
        reference = state.reference_model if self._passes.reference else None
        if reference is not None:
            scores["ref_logps"] = self._scorer(reference, whole.rows, is_reference=True).logps
        self._begun = _Begun(shares, whole, scores)
        self._packings = [share.packing for share in shares]

    def learn(
        self, state: TrainState, rollout: Rollout, advantages: Float[np.ndarray, "P G"]
    ) -> Iterator[tuple[TrainState, dict[str, Array]]]:
        """Makes all updates of a step, one after the other.

        **Arguments:**

        - `state`: the state before the step.
        - `rollout`: the rollout that `begin` was given, with its rewards.
        - `advantages`: those of its completions.

        **Yields:** after each update the state, and the update's metrics, which the devices may
        still be computing. The arrays of the state before are gone then.
        """
        shares = self._with_loss(rollout, advantages)
        for _ in range(self._cfg.num_iterations):
            for share in shares:
                rows = share
                if self._passes.entropies:
                    entropies = self._scorer(state.model, rows, rollout.routes).entropies
                    rows = dataclasses.replace(rows, entropies=entropies)
                state, metrics = self._updater(state, rows, rollout.routes)
                yield state, metrics

    def packing_metrics(self) -> dict[str, float]:
        """Returns the share of padding in the updates' rows, and how evenly devices share them."""
        return {
            "perf/padding_share": fmean(packing.padding_share for packing in self._packings),
            "perf/balance": fmean(packing.balance for packing in self._packings),
        }

    def _packed(self, rollout: Rollout, groups: slice, shape: RowShape) -> _Packed:
        prompts, G = range(len(rollout.groups))[groups], len(rollout.groups[0])
        made = sequences_of(rollout.groups[groups])
        packing = Packing.plan(
            np.array([len(group[0].prompt_ids) for group in made.groups]),
            [[len(each) for each in group] for group in made.groups],
            shape,
        )
        numbers = None if rollout.routes is None else prompts
        rows = pack(made.groups, packing, self._scorer.forward.mesh, numbers)
        samples = [prompts[n // G] * G + n % G for n in made.samples]
        return _Packed(made._replace(samples=samples), packing, rows)

    def _with_loss(self, rollout: Rollout, advantages: Float[np.ndarray, "P G"]) -> list[Rows]:
        """Returns the rows of each share with what the loss reads."""
        assert self._begun is not None, "begin comes first"
        (shares, whole, scores), self._begun = self._begun, None
        mesh, counted = self._scorer.forward.mesh, [self._counted(rollout, x) for x in shares]
        self.num_counted = sum(int(mask.sum()) for own in counted for mask in own)
        per_update = max(self.num_counted, 1) / len(shares)
        of_each = {}
        if len(shares) > 1:  # each has rows of its own
            of_each = {name: take_tokens(fetch(x), whole.packing) for name, x in scores.items()}
        return [
            with_loss(
                share.rows,
                share.packing,
                mesh,
                own,
                advantages.reshape(-1)[share.sequences.samples],
                per_update,
                **{
                    name: place_tokens(_own(values, whole, share), share.packing, mesh)
                    for name, values in of_each.items()
                },
                **({} if of_each else scores),
            )
            for share, own in zip(shares, counted, strict=True)
        ]

    def _counted(self, rollout: Rollout, share: _Packed) -> list[Bool[np.ndarray, " _"]]:
        """Returns True on the tokens of a share's trajectories that the loss counts."""
        kept, masks = ~rollout.left_out.reshape(-1), self._cfg.mask_truncated_completions
        return [
            each.written & (kept[sample] and (each.is_finished or not masks))
            for each, sample in share.sequences.with_samples()
        ]


def _own(values: Sequence[_T], whole: _Packed, share: _Packed) -> list[_T]:
    """Picks the values of a share's trajectories from those of the whole rollout."""
    own = set(share.sequences.samples)
    pairs = zip(values, whole.sequences.samples, strict=True)
    return [value for value, sample in pairs if sample in own]
