"""The report as a file: what it shows of runs, whole or damaged, and that it stays small."""

import html
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.diagnosis import Finding
from grpo_eqx.tracking.metric_registry import find_metric
from grpo_eqx.tracking.report import write_report

from .synthetic_run import HOSTILE, write_run


def diagnose(
    settings: Mapping[str, Any],
    steps: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
    *,
    num_devices: int,
) -> list[Finding]:
    text = f"{len(steps)} steps, {len(evaluations)} evaluations, beta {settings['beta']}"
    text += f", {num_devices} devices"
    return [Finding("entropy_collapse", 7, text, "Lower learning_rate.", last_step=9)]


def healthy(*_: Any, **__: Any) -> list[Finding]:
    return [Finding("loss_near_zero", 1, "The loss is near 0.", "That is right.", "note")]


def report(tmp_path: Path, *runs: Path, rules: Any = healthy) -> str:
    output = tmp_path / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[write_report.__module__], "diagnose", rules)
        assert write_report(runs, output)[0] == output
    return output.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=40)


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on the run."""
    folder = tmp_path_factory.mktemp("report")
    report(folder, run)
    return folder


@pytest.fixture
def page(written: Path) -> str:
    return (written / "report.html").read_text()


def test_it_says_what_was_run_and_how_it_ended(page: str) -> None:
    assert "<h1>run</h1>" in page
    assert "tiny_qwen2 on word_problems" in page
    assert "It finished its 40 steps and wrote its model." in page
    assert "8 × TPU v6e" in page
    assert re.search(r"<code>beta</code></th><td>0.01</td><td class=\"muted\">0</td>", page)
    assert "No rule found anything wrong in 40 steps." in page
    assert "That is right." in page


def test_what_callbacks_logged_is_plotted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, plain=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2]["price in $"] = 0.5
    rows[-1]["style"] = 0.75  # of an evaluation
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(tmp_path, run)
    assert '<figure id="plot-price_in__">' in page
    assert "Logged by a callback or a reward function. 0.5 after step 2." in page
    assert "Logged by a callback or a reward function. 0.75 after step 3." in page


def test_metrics_that_differ_in_punctuation_have_pictures_of_their_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, plain=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"my/len": 1.0, "my_len": 2.0, "bell\a": 3.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(tmp_path, run)
    ids = re.findall(r'<figure id="(plot-[^"]*)">', page)
    assert {"plot-my_len", "plot-my_len_2"} <= set(ids)
    assert len(ids) == len(set(ids))


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "run", steps=3) for folder in ("a", "b")]
    page = report(tmp_path, *runs)
    assert "a/run" in page
    assert "b/run" in page


def test_pictures_of_an_earlier_report_go(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    write_report([write_run(tmp_path / "run", steps=3)], output)
    plots = tmp_path / "report_plots"
    (plots / "of_another_run.png").write_bytes(b"")
    written = write_report([tmp_path / "run"], output)
    assert sorted(plots.iterdir()) == sorted(written[1:])


def test_findings_are_those_of_the_rules(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "run", steps=40, plain=True), rules=diagnose)
    assert "entropy collapse" in page
    assert "from step 7 to 9" in page
    assert "40 steps, 2 evaluations, beta 0.01, 8 devices" in page
    assert "Lower learning_rate." in page
    assert "No rule found" not in page


def test_every_plot_is_in_the_page_and_a_picture_beside_it(page: str, written: Path) -> None:
    plots = re.findall(r'<figure id="plot-(\w+)">', page)
    pictures = {path.stem for path in (written / "report_plots").glob("*.png")}
    assert set(plots) == pictures
    assert {"reward", "eval_greedy_pass_1", "entropy", "kl", "grad_norm", "step_time"} <= pictures
    assert {"rewards_correct_mean", "memory_train_peak_bytes_in_use_max_gib"} <= pictures
    assert len(re.findall(r"<title id", page)) == len(re.findall(r"<desc id", page)) == len(plots)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_plots_have_the_units_and_meanings_of_the_registry(page: str) -> None:
    for name in ("kl", "completions/clipped_ratio", "eval/greedy/pass@1", "rewards/correct/mean"):
        metric = find_metric(name)
        assert metric is not None
        plot = "".join(letter if letter.isalnum() else "_" for letter in name)
        (figure,) = re.findall(rf'<figure id="plot-{plot}">.*?</figure>', page, re.DOTALL)
        assert html.escape(metric.meaning.replace("`", ""), quote=False) in figure
        assert f">{metric.unit}</text>" in figure


def test_what_a_model_writes_stays_text(page: str) -> None:
    assert "&lt;/script&gt;&lt;/pre&gt;&lt;script&gt;alert(1)" in page
    assert "{{ 7 * 7 }}" in page
    assert HOSTILE not in page
    assert "<span>2 calls (1 failed)</span>" in page
    assert '<p class="logged">verdict <span>good &lt;/script&gt;' in page
    assert not re.search(r"<(script|img|iframe|link|object)\b", page)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]+"|http://example.com|http-equiv', "", page)


def test_hostile_names_stay_text_too(tmp_path: Path) -> None:
    name = "<script>$x^2$ #0072b2 & 漢"
    losses = ("dapo", "grpo")
    page = report(
        tmp_path,
        *(
            write_run(tmp_path / loss, steps=3, plain=True, run_name=name, loss_type=loss)
            for loss in losses
        ),
    )
    assert "<script>" not in page
    assert "&lt;script&gt;$x^2$ #0072b2 &amp; 漢" in page  # in legends, no formula and no color


def test_seeds_are_one_line_with_a_band_and_other_runs_their_own(tmp_path: Path) -> None:
    seeds = [
        write_run(tmp_path / f"seed{seed}", steps=20, plain=True, seed=seed) for seed in (0, 1)
    ]
    other = write_run(tmp_path / "other", steps=10, plain=True, learning_rate=1e-3)
    page = report(tmp_path, *seeds, other)
    assert "seed0 (2 seeds): seeds 0, 1 of the same settings." in page
    (reward,) = re.findall(r'<figure id="plot-reward">.*?</figure>', page, re.DOTALL)
    assert re.findall(r">(seed0 \(2 seeds\)|other|seed1)</text>", reward) == [
        "seed0 (2 seeds)",
        "other",
    ]
    assert "fill-opacity" in reward  # the band
    assert '<tr class="differs"><th scope="row"><code>learning_rate</code></th>' in page
    assert "<code>seed</code>" not in page


def test_a_seed_that_ended_early_hides_no_curve(tmp_path: Path) -> None:
    seeds = [
        write_run(tmp_path / f"seed{seed}", steps=20, plain=True, seed=seed) for seed in (0, 1, 2)
    ]
    rows = (seeds[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (seeds[1] / "metrics.jsonl").write_text("".join([*rows[:8], rows[7]]))  # its last step twice
    (seeds[2] / "metrics.jsonl").write_text(rows[0])  # no step
    page = report(tmp_path, *seeds)
    assert "seed0 (3 seeds) end at different steps, 0, 7, 20" in page
    (reward,) = re.findall(r'<figure id="plot-reward">.*?</figure>', page, re.DOTALL)
    assert "after step 20" in reward


def test_a_run_that_is_going_on_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, plain=True)
    (run / "model").rmdir()
    (run / ".lock").write_text('{"host": "here"}')
    lines = (run / "metrics.jsonl").read_text().splitlines()[:8]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 8, "rew']))
    page = report(tmp_path, run)
    assert "It is going on, at step 7 of 20." in page
    assert "What could not be read" not in page  # of the line that is being written


def test_before_the_first_step_there_is_a_page_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, plain=True)
    (run / "model").rmdir()
    (run / "metrics.jsonl").write_text("")
    for table in (run / "completions").iterdir():
        table.unlink()
    page = report(tmp_path, run)
    assert "It recorded no step." in page
    assert "The run has no table of completions" in page


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30, plain=True)
    (run / "config.json").write_text("{")
    (run / "layout.json").unlink()
    (run / "completions" / "step_000030.parquet").write_bytes(b"nothing")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[4] = '{"step": 4, "reward": "high"}'
    (run / "metrics.jsonl").write_text("\n".join(lines))
    page = report(tmp_path, run, rules=diagnose)
    for gap in (
        "config.json is not valid JSON",
        "layout.json cannot be read: No such file or directory",
        "metrics.jsonl has 1 line that is damaged or repeated (5)",
        "step_000030.parquet cannot be read (",
        "Without its settings, the run is not diagnosed.",
    ):
        assert gap in page
    assert 'id="plot-reward"' in page
    assert "Best of step 20" in page


def test_the_peak_is_compared_with_the_plan_where_one_is_recorded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    assert "No plan is recorded with run" in report(tmp_path, run)
    (run / "plan.json").write_text(json.dumps({"peak_bytes": 6 * 2**30}))
    page = report(tmp_path, run)
    assert "No plan is recorded" not in page
    assert "planned peak 6" in page
    assert "<td>6.00 GiB</td>" in page


@pytest.mark.slow
def test_a_thousand_steps_fit_in_three_megabytes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{seed}", steps=1000, seed=seed) for seed in range(2)]
    runs.append(write_run(tmp_path / "other", steps=1000, learning_rate=1e-3))
    assert len(report(tmp_path, runs[0]).encode()) < 1_000_000
    assert len(report(tmp_path, *runs).encode()) < 3_000_000


def test_a_folder_that_is_no_run_and_a_file_that_cannot_be_written(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        report(tmp_path, tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        write_report([run], tmp_path / "no" / "report.html")
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path, Path(), tmp_path / "pipe"):  # a device of root's was replaced
        before = sorted(tmp_path.iterdir())
        with pytest.raises(UserError, match="is not a file: give one that can be replaced"):
            write_report([run], output)
        assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()


def test_it_shows_what_was_passed_in_place_of_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    passed = {"reward_funcs": "judge, passed to GRPOTrainer"}
    (run / "passed.json").write_text(json.dumps(passed))
    assert "judge, passed to GRPOTrainer" in report(tmp_path, run)
    (run / "passed.json").write_text("[]")
    assert "passed.json holds []: expected a JSON object" in html.unescape(report(tmp_path, run))
