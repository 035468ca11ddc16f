"""A doctor for runs: rules that read metrics, and say what is wrong and what to do."""

from grpo_eqx.tracking.diagnosis.diagnose import RULES as RULES
from grpo_eqx.tracking.diagnosis.diagnose import Doctor as Doctor
from grpo_eqx.tracking.diagnosis.diagnose import diagnose as diagnose
from grpo_eqx.tracking.diagnosis.rule import Finding as Finding
from grpo_eqx.tracking.diagnosis.rule import Rule as Rule
