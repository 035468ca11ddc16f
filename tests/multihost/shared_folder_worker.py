"""One process of two that checks a folder; says whether it is shared.

python shared_folder_worker.py FOLDER
"""

import sys
from pathlib import Path

from grpo_eqx.checkpoint.shared_folder import check_shared
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.startup import initialize

if __name__ == "__main__":
    initialize()
    try:
        check_shared(Path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}")
    else:
        print("shared")
