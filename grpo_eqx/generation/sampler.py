"""The seam for where completions come from."""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_eqx.data.acted import Acted
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.generation.routes import Routes
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.models.interface import CausalLM


class SamplingCounts(NamedTuple):
    """Work that decoding took; 0 where a sampler does not know."""

    steps: int = 0
    """Decoding steps; each yields a token for every live slot."""
    slots: int = 0
    """Slots summed over those steps, idle ones included."""
    cache_share: float = 0.0
    """Share of the slots' caches that attention read, summed over those slots and steps."""
    tokens: int = 0
    """Tokens that were drawn."""

    def plus(self, other: "SamplingCounts") -> "SamplingCounts":
        """Adds the work of another rollout."""
        return SamplingCounts(
            self.steps + other.steps,
            self.slots + other.slots,
            self.cache_share + other.cache_share,
            self.tokens + other.tokens,
        )


NO_COUNTS = SamplingCounts()


class Sampled(NamedTuple):
    """Results of a sampler."""

    trajectories: list[Trajectory]
    """The trajectories that it was given, in the same order, with their completions; as far as they
    are, where it was told to stop early."""
    counts: SamplingCounts = NO_COUNTS
    routes: Routes | None = None
    """Experts that its routers chose, on the devices, where they are to be replayed."""
    acted: Acted | None = None
    """Dialogues of the completions, of samplers that act."""
    ended: Sequence[int] = ()
    """Numbers of completions in the order in which they ended, of samplers that stop early."""


Until = Callable[[Sequence[int]], bool]
"""Is told which completions have ended since its last call, by their numbers among those that were
submitted, and returns whether that is enough."""


class Responder(abc.ABC):
    """Other side of a dialogue: says what the model reads after each of its turns.

    All processes of a run call it alike, and get the same replies.
    """

    @abc.abstractmethod
    def take(self, number: int, trajectory: Trajectory) -> None:
        """Takes a completion whose turn has ended, and does not wait for the reply.

        **Arguments:**

        - `number`: index of the trajectory among those that were submitted.
        - `trajectory`: the trajectory, with its completion so far.
        """

    @abc.abstractmethod
    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        """Returns the replies that are there, by the number of their trajectory.

        A reply is the tokens that the model reads next, at least one; `None` ends the completion.
        A reply that leaves no room for another token ends it too, by its length, and is not read.

        **Arguments:**

        - `wait`: whether to wait for a reply where there is none.
        """


class PendingSamples(abc.ABC):
    """Completions that a sampler is working on."""

    @abc.abstractmethod
    def result(self) -> Sampled:
        """Waits until all of them have ended, and returns them."""

    def in_background(self) -> "PendingSamples":
        """Has the sampler go on while the caller does other things, and returns the completions.

        A sampler whose devices work on their own does so in any case.
        """
        return self

    def wait(self) -> None:  # noqa: B027
        """Waits until nothing is done in the background any more; raises no error of it."""

    def release(self) -> None:  # noqa: B027
        """Says that the environments of the results are not looked at any more."""


class Sampler(abc.ABC):
    """Source of completions.

    It completes trajectories with the weights that it was given last. All processes of a run call
    it alike.
    """

    @abc.abstractmethod
    def set_weights(self, model: CausalLM, version: int) -> None:
        """Takes the weights for everything that is submitted from now on.

        **Arguments:**

        - `model`: the model, as training holds it.
        - `version`: number of the weights, which tokens drawn with them carry.
        """

    @abc.abstractmethod
    def submit(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling | None = None,
        *,
        problems: Sequence[Prompt | None] | None = None,
        prompt_width: int | None = None,
        responder: Responder | None = None,
        until: Until | None = None,
    ) -> PendingSamples:
        """Begins to complete trajectories, and does not wait for them.

        **Arguments:**

        - `trajectories`: prompts with the addresses of their draws. Trajectories of one prompt
          follow each other, the same number for every prompt. With a responder, completions may
          begin with tokens of others.
        - `sampling`: how tokens are drawn; by default as in training.
        - `problems`: the problem of each prompt, for samplers that act; `None` for prompts that
          only fill the batch up.
        - `prompt_width`: length to which prompts may be padded, for samplers that compile programs
          for each; by default that of the longest.
        - `responder`: says what follows a turn; by default, completions have a single one.
        - `until`: stops sampling early. Groups may then have completions that have ended, and
          others that go on; a group keeps its place for as long as it is submitted.
        """
