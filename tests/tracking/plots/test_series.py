"""Courses of metrics as they are drawn: smooth, thin, and joined over seeds."""

import numpy as np

from grpo_eqx.tracking.plots.series import Band, Course, running_mean, window


def course(*values: float, first: int = 1) -> Course:
    return Course(np.arange(first, first + len(values), dtype=float), np.array(values, float))


def test_a_running_mean_is_over_the_last_values() -> None:
    means = running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    np.testing.assert_array_equal(means, [1, 2, 4, 6])


def test_a_missing_value_is_left_out_of_the_means_and_spoils_no_later_one() -> None:
    means = running_mean(np.array([np.nan, 2.0, np.nan, np.nan, 4.0]), 2)
    np.testing.assert_array_equal(means, [np.nan, 2, 2, np.nan, 4])


def test_the_window_grows_with_the_run() -> None:
    assert [window(count) for count in (1, 10, 30, 1000)] == [1, 2, 6, 10]


def test_a_long_course_is_thinned_and_keeps_its_extremes() -> None:
    values = np.zeros(5000)
    values[1234], values[4321] = 9.0, -9.0
    thin = course(*values).thinned()
    assert len(thin.values) <= 400
    assert (thin.values.max(), thin.values.min()) == (9, -9)
    assert thin.steps[thin.values.argmax()] == 1235
    assert (np.diff(thin.steps) > 0).all()


def test_a_short_course_stays_as_it_is() -> None:
    short = course(1.0, 2.0)
    assert short.thinned() is short


def test_a_band_is_over_the_seeds_that_made_each_step() -> None:
    band = Band.of([course(1.0, 2.0, 3.0), course(4.0, 5.0, first=2), course(np.nan)])
    np.testing.assert_array_equal(band.mean.steps, [1, 2, 3])
    np.testing.assert_array_equal(band.mean.values, [1, 3, 4])
    np.testing.assert_array_equal(band.low.values, [1, 2, 3])
    np.testing.assert_array_equal(band.high.values, [1, 4, 5])


def test_of_a_repeated_step_the_last_value_counts() -> None:
    repeated = Course(np.array([2.0, 1.0, 2.0]), np.array([7.0, 1.0, 3.0]))
    np.testing.assert_array_equal(repeated.one_per_step().steps, [1, 2])
    np.testing.assert_array_equal(repeated.one_per_step().values, [1, 3])
    band = Band.of([repeated, course(3.0, 5.0)])
    np.testing.assert_array_equal(band.mean.values, [2, 4])


def test_values_are_found_by_their_steps() -> None:
    np.testing.assert_array_equal(course(1.0, 2.0).at(np.array([2.0, 7.0])), [2, np.nan])
