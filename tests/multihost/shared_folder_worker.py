"""One process of two that checks a folder; says whether it is shared.

python shared_folder_worker.py FOLDER
"""

import sys
from pathlib import Path

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.loop.start import check_shared

if __name__ == "__main__":
    initialize()
    try:
        check_shared(Path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}")
    else:
        print("shared")
