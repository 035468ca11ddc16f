"""Tokens with their probabilities, in colors or digits."""

import math

from grpo_eqx.tracking.heat_strip import heat_strip, legend

TOKENS = ["He", " has", "\n", "7", "\x1b", "<|im_end|>"]
LOGPS = [math.log(p) for p in (0.99, 0.6, 0.2, 0.05, 0.001, 1.0)]


def test_colors_say_how_likely_tokens_were() -> None:
    shown = heat_strip(TOKENS, LOGPS, colored=True, width=80)
    assert shown.plain == "He has\\n\n7\\x1b<|im_end|>"
    styles = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert set(styles) == {" has", "\\n", "7", "\\x1b"}  # the likely ones have none
    assert len(set(styles.values())) == 4
    assert {*styles.values()} <= {span.style for span in legend(colored=True).spans}


def test_digits_are_below_the_tokens_that_they_are_of() -> None:
    shown = heat_strip(TOKENS, LOGPS, colored=False, width=12)
    assert shown.plain.split("\n") == [
        "He has\\n7",
        "9 6   2 0",
        "\\x1b",
        "0",
        "<|im_end|>",
        "9",
    ]


def test_what_the_model_did_not_write_has_no_probability() -> None:
    logps = [math.nan, 0.0, math.nan]
    assert heat_strip(["a", "b", "c"], logps, colored=False, width=9).plain == "abc\n 9"
    (first, last) = heat_strip(["a", "b", "c"], logps, colored=True, width=9).spans
    assert first.style == last.style
    assert last.style in {span.style for span in legend(colored=True).spans}


def test_log_probs_that_rounding_made_positive_or_missing_do_no_harm() -> None:
    assert heat_strip(["a", "b"], [0.001, -math.inf], colored=False, width=9).plain == "ab\n90"
