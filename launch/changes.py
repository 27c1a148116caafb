"""Before runs are taken for done, or resumed: were they made with the data and the sources that are here now?"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from fedspec_dist.config import Config
from launch.start import SubmitError


class Changes:
    """Compares what run folders say of themselves with what is here, each folder once.

    What is not known here, such as the digest of data that lie elsewhere, the runs compare themselves when they start.
    """

    def __init__(self, accept: bool = False) -> None:
        self._accept = accept
        self._seen: set[Path] = set()

    def check(self, configs: Iterable[Config]) -> None:
        """With `accept`, finished runs note that they are taken as they are.

        Raises:
            SubmitError: the data, a plugin or the package changed since, and nobody accepts it.
        """
        # Late, like everything that needs more than the config.
        from fedspec_dist.runs.folder import RunFolder
        from fedspec_dist.runs.identity import ChangedError, identity_of, settle

        refused: list[tuple[Path, ChangedError]] = []
        accepted: list[tuple[Path, str]] = []
        for config in configs:
            folder = config.run_folder()
            if folder in self._seen:
                continue
            self._seen.add(folder)
            try:
                if changed := settle(RunFolder(folder), partial(identity_of, config), self._accept):
                    accepted.append((folder, "; ".join(changed)))
            except ChangedError as error:
                refused.append((folder, error))
        if accepted:
            more = f" ({len(accepted)} runs like this)" if accepted[1:] else ""
            print(f"{accepted[0][0]}: taken although this changed: {accepted[0][1]}{more}", file=sys.stderr)
        if refused:
            more = f"\nThe same goes for {len(refused) - 1} more, for example {refused[1][0]}" if refused[1:] else ""
            raise SubmitError(f"{refused[0][1]}{more}")
