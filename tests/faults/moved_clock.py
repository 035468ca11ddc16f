"""The command `grpo-eqx`, whose clock is ahead: by the days in CLOCK_DAYS, on process 1 by one."""

import datetime
import os
import sys

from grpo_eqx import trainer as trainer  # with all that a run imports
from grpo_eqx.cli.main import main
from grpo_eqx.evaluation import standalone as standalone

DAYS = float(os.environ["CLOCK_DAYS"]) + (sys.argv[-2:] == ["--process-id", "1"])


class MovedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "MovedDatetime":
        return super().now(tz) + datetime.timedelta(days=DAYS)


if __name__ == "__main__":
    from transformers.utils import chat_template_utils as chat_template_utils

    for name, module in list(sys.modules.items()):
        own = name.startswith(("grpo_eqx.", "transformers.utils.chat"))
        if own and vars(module).get("datetime") is datetime.datetime:
            vars(module)["datetime"] = MovedDatetime
    main()
