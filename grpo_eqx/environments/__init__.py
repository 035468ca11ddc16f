"""Tools that completions call, environments that they act in, and the dialogues with them."""

from grpo_eqx.environments.environment import Environment as Environment
from grpo_eqx.environments.environment import Step as Step
from grpo_eqx.environments.harness import Harness as Harness
from grpo_eqx.environments.harness_endpoint import HarnessEndpoint as HarnessEndpoint
from grpo_eqx.environments.rollout_func import RolloutFunc as RolloutFunc
from grpo_eqx.environments.rollout_func import RolloutTrainer as RolloutTrainer
from grpo_eqx.environments.verifiers import VerifiersHarness as VerifiersHarness
