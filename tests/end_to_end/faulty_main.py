"""`fedspec_dist.main` with a fault in one rank from round 2 on: FAULT is raise or hang, FAULTY_RANK the rank."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from fedspec_dist import main
from fedspec_dist.rounds import loop


def _faulty(*arguments: Any) -> Any:
    round_index = arguments[5]
    if round_index >= 1:
        if os.environ["FAULT"] == "hang":
            time.sleep(300)
        raise RuntimeError("the fault that was asked for")
    return _train_clients(*arguments)


_train_clients = loop.train_clients
if os.environ.get("RANK", "0") == os.environ["FAULTY_RANK"]:
    loop.train_clients = _faulty

if __name__ == "__main__":
    sys.exit(main.main())
