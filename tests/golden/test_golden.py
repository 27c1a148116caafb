"""What must not change without being meant to, against `golden.json`; `tests.golden.record` says what that is.

Where a change was meant: `python -m tests.golden.record`, and a word on every line that differs.
"""

from __future__ import annotations

import json

import pytest

from fedspec_dist.config import load
from tests.golden import record

GOLDEN = json.loads(record.FILE.read_text())
# Elsewhere kernels may round otherwise, and two rounds of training carry that on.
TOLERANCE = 1e-2


def test_runs_keep_their_folders() -> None:
    assert dict(record.named_fingerprints()) == GOLDEN["fingerprints"]


def test_random_configs_keep_their_folders() -> None:
    assert len(GOLDEN["random"]) >= record.NUM_RANDOM
    changed = [(given, was, now) for given, was in GOLDEN["random"] if (now := load(None, given).fingerprint()) != was]
    assert not changed


def test_every_method_has_a_run() -> None:
    assert record.settings().keys() == GOLDEN["runs"].keys()


@pytest.mark.parametrize("name", record.settings())
def test_runs_end_in_the_same_bits(name: str) -> None:
    """The same bits on the machine of the record, about the same model on any other."""
    expected = GOLDEN["runs"][name]
    found = record.outcome(record.settings()[name])
    assert found["metrics"] == expected["metrics"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE, abs=TOLERANCE)
    if record.where() == GOLDEN["where"]:
        assert found["bits"] == expected["bits"]


@pytest.mark.parametrize("command", record.COMMANDS)
def test_commands_keep_their_options(command: str) -> None:
    assert record.options_of(command) == GOLDEN["help"][command]
