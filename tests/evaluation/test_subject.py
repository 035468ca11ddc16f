"""What an evaluation of its own is of."""

from pathlib import Path

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.evaluation.subject import Subject
from grpo_eqx.tracking.run_folder import RunFolder


def test_a_run_whose_settings_are_damaged_is_refused_with_what_to_give(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.touch()
    run.model.mkdir()
    run.config.write_text('{"steps": 2')
    with pytest.raises(UserError, match=r"config\.json is not valid JSON .*give its folder model"):
        Subject.find(str(tmp_path))
