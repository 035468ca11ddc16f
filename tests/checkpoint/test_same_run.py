import json
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import FACTS, DamagedError, SavedStep, digest
from grpo_eqx.common.errors import UserError
from grpo_eqx.evaluation.subject import Subject

FIELDS: dict[str, Any] = {"config": {}, "fingerprints": {}}
FIELDS |= {name: {} for name in ("shapes", "checksums", "counters")}


def saved(folder: Path, **changed: Any) -> SavedStep:
    facts = {name: x for name, x in {**FIELDS, **changed}.items() if x is not ...}
    path = folder / "step_2" / FACTS
    path.mkdir(parents=True)
    (path / "metadata").write_text(json.dumps({"facts": facts, "sha256": digest(facts)}))
    return SavedStep(folder, 2)


def test_facts_of_earlier_versions_lack_what_is_newer(tmp_path: Path) -> None:
    assert RunFacts.saved(saved(tmp_path)) == RunFacts({}, {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": 5}, "config is 5: expected an object with names"),
        ({"config": ...}, "has no config"),
        ({"fingerprints": [1]}, r"fingerprints is \[1\]: expected an object"),
        ({"commits": "x"}, "commits is 'x': expected an object"),
        ({"versions": 5}, "versions is 5: expected an object"),
        ({"reward_code": []}, r"reward_code is \[\]: expected an object"),
        ({"time": 5}, "time is 5: expected a text"),
        ({"time": "never"}, "cannot be read .*never"),
        ({"shapes": 5}, "shapes is 5: expected an object"),
        ({"checksums": [1]}, r"checksums is \[1\]: expected an object"),
        ({"counters": ...}, "has no counters"),
    ],
)
def test_facts_of_other_types_are_those_of_a_damaged_checkpoint(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DamagedError, match=message):
        RunFacts.saved(saved(tmp_path, **changed))
    with pytest.raises(UserError, match=message):
        Subject.find(str(tmp_path / "step_2"))
