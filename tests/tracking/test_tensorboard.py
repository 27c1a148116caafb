from __future__ import annotations

import builtins
import warnings
from pathlib import Path
from typing import Any

import pytest

from fedspec_dist.runs.trackers.tensorboard import TensorBoard


def _scalars(folder: Path, name: str) -> dict[int, float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_numbers_are_scalars_and_a_resumed_run_hides_the_rounds_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TensorBoard's own dependencies
        first = TensorBoard(tmp_path, resumed_round=0)
        for done in (1, 2, 3):
            first.log({"round": done, "test_accuracy": done / 10, "cohort": [1, 2], "fedgh/conflict_ratio": 0.5})
        first.close()
        resumed = TensorBoard(tmp_path, resumed_round=2)
        resumed.log({"round": 3, "test_accuracy": 0.75, "test_loss": None})
        resumed.close()
    assert _scalars(tmp_path, "test_accuracy") == {1: pytest.approx(0.1), 2: pytest.approx(0.2), 3: 0.75}
    assert _scalars(tmp_path, "fedgh/conflict_ratio") == {1: 0.5, 2: 0.5}


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"tracking\.tensorboard: needs the package tensorboard: pip install"):
        TensorBoard(tmp_path, 0)
