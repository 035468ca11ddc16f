"""Contents of the slots of a session, on the host."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import num_shards


def place_of(
    layout: RolloutLayout, shape: tuple[int, ...], slot: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the device of a slot, and its number among those of the device.

    **Arguments:**

    - `layout`: the layout over devices.
    - `shape`: numbers of rows, and of slots of each.
    - `slot`: row and column of the slot.
    """
    groups = num_shards(layout.mesh, layout.groups)
    rows, columns = shape[0] // layout.num_prompt_shards, shape[1] // groups
    (row, column) = slot
    device = row // rows * groups + column // columns
    return device, row % rows * columns + column % columns


class SlotTable:
    """Slots, the completions in them, and those that wait for one."""

    completion: Int[np.ndarray, "R W"]
    """Number of the completion of each slot; negative where it has none."""
    live: Bool[np.ndarray, "R W"]
    """True where a slot decodes."""

    def __init__(
        self,
        layout: RolloutLayout,
        batch: tuple[int, int],
        num_slots: int,
        trajectories: Sequence[Trajectory],
        held: Mapping[int, int],
    ):
        """Gives every completion a slot, or has all that have not ended wait for one.

        **Arguments:**

        - `layout`: the layout over devices, each shard of which has its own prompts.
        - `batch`: number of prompts, and of completions of each.
        - `num_slots`: number of slots.
        - `trajectories`: the completions.
        - `held`: completions that slots hold already, by their rows.
        """
        self._layout = layout
        self._number = N = len(trajectories)
        shards = layout.num_prompt_shards
        if num_slots == N:
            self.completion = np.arange(N, dtype=np.int32).reshape(batch)
            waiting: list[list[int]] = []
        else:
            self.completion = np.full((num_slots, 1), -1, np.int32)
            for row, number in held.items():
                self.completion[row] = number
            here = {*held.values()}
            left = [
                n for n, each in enumerate(trajectories)
                if each.finish_reason is None and not each.awaits_reply and n not in here
            ]  # fmt: skip
            left.sort(key=lambda n: trajectories[n].address)  # the oldest first
            waiting = [[n for n in left if n * shards // N == part] for part in range(shards)]
        self._waiting = [deque(each) for each in waiting]
        waits = [n for n, each in enumerate(trajectories) if each.awaits_reply]
        self.live = (self.completion >= 0) & ~np.isin(self.completion, waits)
        self.slot = {int(n): at for at, n in np.ndenumerate(self.completion) if n >= 0}
        """The slot of each completion that has one."""

    def wait(self, number: int) -> None:
        """Has a completion without a slot wait for one."""
        self._waiting[number * len(self._waiting) // self._number].append(number)

    @property
    def size_per_device(self) -> int:
        return self.completion.size // self._layout.num_shards

    def place(self, number: int) -> tuple[int, int]:
        """Returns the device of a completion's slot, and its number among those of the device."""
        return place_of(self._layout, self.completion.shape, self.slot[number])

    def refill(self, trajectories: Sequence[Trajectory]) -> Int[np.ndarray, " R"]:
        """Gives slots without a completion, or of one that has ended, to those that wait.

        **Arguments:**

        - `trajectories`: the completions as they are.

        **Returns:** for each row the completion that it now has; negative where nothing changes.
        """
        taken = np.full(len(self.completion), -1, np.int32)
        for row, number in enumerate(self.completion[:, 0].tolist()):
            if not any(self._waiting):
                break
            waiting = self._waiting[row * len(self._waiting) // len(taken)]
            if waiting and (number < 0 or trajectories[number].finish_reason is not None):
                taken[row] = self.completion[row, 0] = waiting.popleft()
                self.slot[int(taken[row])] = row, 0
                self.live[row] = True
        return taken
