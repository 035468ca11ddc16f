"""Predicts by compilation whether a run fits its devices, and what it will do there."""

from grpo_eqx.common.choices import Searchable as Searchable
from grpo_eqx.planner.compiled_program import CompiledProgram as CompiledProgram
from grpo_eqx.planner.plan import Change as Change
from grpo_eqx.planner.plan import Found as Found
from grpo_eqx.planner.plan import Plan as Plan
from grpo_eqx.planner.plan import PlannedProgram as PlannedProgram
from grpo_eqx.planner.plan_run import plan_config as plan_config
from grpo_eqx.planner.report import print_plan as print_plan
