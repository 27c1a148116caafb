"""A run is the same run while its config, its data and its sources are: whoever finds results compares all three."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedspec_dist import main
from fedspec_dist.config import load, methods
from fedspec_dist.data import files
from fedspec_dist.runs import identity, sources
from fedspec_dist.runs.identity import Identity, differences, identity_of, used_plugins
from launch import submission, submit, sweep

CONFIG = {
    "name": "tiny",
    "plugins": ["mine_plugin"],
    "data": {"dataset": "npz", "path": "d.npz", "root": "root", "partition": {"type": "iid", "clients": 4}},
    "model": {"type": "mlp", "hidden": [3]},
    "server": {"weights": "mine"},
    "rounds": 3,
    "clients_per_round": 2,
    "local": {"epochs": 1},
    "checkpoint": {"every": 1},
    "runtime": {"device": "cpu"},
}
PLUGIN = """
from fedspec_dist.config.methods import register
from fedspec_dist.server.weights.shares import Uniform
import mine_helper

class Mine(Uniform):
    pass

register("server.weights", "mine", "mine_plugin:Mine")
"""


def write_data(path: Path, seed: int) -> None:
    """Always of the same size and with the same times."""
    rng = np.random.default_rng(seed)
    images, labels = rng.integers(256, size=(40, 6, 6), dtype=np.uint8), np.arange(40) % 3
    np.savez(path, train_images=images, train_labels=labels, test_images=images[:9], test_labels=labels[:9])
    os.utime(path, (1, 1))


def _forget() -> None:
    """What a process remembers: each command of a user is another process."""
    for cached in (sources.package_digest, sources.module_digest, sources._content, sources._sources):
        cached.cache_clear()
    for cached in (sources._find, sources._entry):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("mine_")]:
        del sys.modules[name]
    methods.WEIGHTS.pop("mine", None)
    importlib.invalidate_caches()


@pytest.fixture
def console() -> Iterator[None]:
    """As it was before a command of ours set it up."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the run has finished once."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "s.yaml").write_text("config: c.yaml\nseeds: [0]\n")
    (folder / "mine_plugin.py").write_text(PLUGIN)
    (folder / "mine_helper.py").write_text("FACTOR = 1\n")
    (folder / "mine_observer.py").write_text("SEEN = []\n")
    write_data(folder / "d.npz", 1)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        _forget()
        assert main.main(["c.yaml"]) == 0
    root.handlers[:] = handlers
    root.setLevel(level)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: None) -> Iterator[Path]:
    """A copy of that folder, in which the command is started."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    os.utime(folder / "d.npz", (1, 1))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    _forget()
    yield folder
    _forget()


def _run_folder(here: Path) -> Path:
    (found,) = (here / "runs").iterdir()
    return found


def _nothing(here: Path) -> None:
    pass


def _stop_after_round_2(here: Path) -> None:
    """What a run that was killed leaves."""
    folder = _run_folder(here)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "round-000003")


STATES = {"finished": _nothing, "stopped": _stop_after_round_2}

CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "data": (lambda here: write_data(here / "d.npz", 2), "the data"),
    "plugin": (lambda here: (here / "mine_plugin.py").write_text(PLUGIN + "# edited"), "the plugin mine_plugin"),
    "what a plugin imports": (lambda here: (here / "mine_helper.py").write_text("FACTOR = -1"), "the plugin mine_plu"),
    "package": (lambda here: None, "the sources of fedspec_dist"),
}


def _sweep(*options: str) -> int:
    return sweep.main(["s.yaml", "--dry-run", *options])


def _submit(*options: str) -> int:
    return submit.main(["c.yaml", "--cluster", "local", *options])


COMMANDS = {"main": lambda *options: main.main(["c.yaml", *options]), "sweep": _sweep, "submit": _submit}


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that would have been started."""
    jobs: list[Any] = []

    def start(folder: Path, config: Any, layout: Any, job: Any, time_limit: bool) -> str:
        jobs.append(job)
        return "1"

    monkeypatch.setattr(submission, "start_here", start)
    return jobs


def _change(what: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    change, named = CHANGES[what]
    if what == "package":
        monkeypatch.setattr(identity, "package_digest", lambda: "0" * 16)
    change(here)
    _forget()
    return named


def _content(here: Path) -> dict[Path, bytes]:
    """Of the run folder's files, but for the account of its starts, refused ones included."""
    files = [path for path in _run_folder(here).rglob("*") if path.is_file() and path.name != "events.jsonl"]
    return {path: path.read_bytes() for path in files}


def test_a_network_by_its_path_counts_and_is_not_imported_for_that(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(None, ["model={type: module, path: 'mine_nets:Net', arguments: {width: 3}}"])
    assert config.fingerprint() != load(None, ["model={type: module, path: 'mine_nets:Net'}"]).fingerprint()
    seen = []
    for text in ("raise SystemExit", "raise SystemExit  # edited"):
        (tmp_path / "mine_nets.py").write_text(text)
        _forget()
        seen.append(identity_of(config, with_data=False))
    assert "the plugin mine_nets" in " ".join(differences(*seen))
    sources.copy_sources(used_plugins(config), tmp_path / "copies")
    assert [path.read_text() for path in tmp_path.glob("copies/mine_nets-*/mine_nets.py")] == [text]


def test_pretrained_weights_count_by_their_content(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(None, ["model={type: torchvision, name: resnet18, pretrained: ~/w.pt}"])
    missing = identity_of(config, with_data=False)
    (tmp_path / "w.pt").write_bytes(b"one")
    one = identity_of(config, with_data=False)
    (tmp_path / "w.pt").write_bytes(b"other")
    other = identity_of(config, with_data=False)
    assert missing.plugins["model.pretrained"] == ""
    assert differences(missing, one) == []
    assert "the weights of model.pretrained" in " ".join(differences(one, other))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_refused_with_one_message_unless_it_is_accepted(
    what: str,
    state: str,
    command: str,
    here: Path,
    submitted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    STATES[state](here)
    named = _change(what, here, monkeypatch)
    before = _content(here)
    start = COMMANDS[command]
    capsys.readouterr()
    assert start() == 1
    (message,) = capsys.readouterr().err.splitlines()
    since = "it finished after round 3" if state == "finished" else "round 2"
    assert f"since {since} this changed: {named}" in message
    assert all(option in message for option in ("--fresh", "--accept-changes", "name="))
    assert before == _content(here), "a refusal changed something"
    assert submitted == []

    _forget()
    assert start("--accept-changes") == 0
    said = capsys.readouterr()
    if command == "sweep":
        assert f"# {int(state == 'stopped')} of 1 runs to do" in said.out
        assert ("--accept-changes" in said.out) == (state == "stopped")
    elif command == "submit":
        assert [job.arguments[-1] for job in submitted] == ["--accept-changes"] * (state == "stopped")
    if command == "main" and state == "stopped":
        starts = json.loads((_run_folder(here) / "environment.json").read_text())["starts"]
        assert [start["resumed_after_round"] for start in starts] == [0, 2]
        assert named in starts[1]["changes_accepted"][0]
        assert starts[0]["identity"] != starts[1]["identity"]
        summary = json.loads((_run_folder(here) / "summary.json").read_text())
        assert named in summary["changes_accepted"][0], "a result of two makings says so"
    if state == "finished" or command == "main":
        _forget()
        assert start() == 0, "what was accepted once is not asked again"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", STATES)
def test_fresh_starts_over_whatever_changed(
    state: str, command: str, here: Path, submitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    STATES[state](here)
    write_data(here / "d.npz", 2)
    assert COMMANDS[command]("--fresh") == 0
    if command == "sweep":
        assert "# 1 of 1 runs to do" in capsys.readouterr().out
    elif command == "submit":
        assert len(submitted) == 1
        assert not (_run_folder(here) / "checkpoints").exists()
    else:
        assert len(json.loads((_run_folder(here) / "environment.json").read_text())["starts"]) == 1


@pytest.mark.parametrize("state", STATES)
def test_what_decides_nothing_is_no_change(state: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STATES[state](here)
    os.utime(here / "d.npz")
    (here / "mine_observer.py").write_text("SEEN = [1]\n")  # beside the plugin, and not imported by it
    os.utime(here / "mine_plugin.py")
    assert main.main(["c.yaml"]) == 0
    assert "changed" not in capsys.readouterr().err


def test_equal_data_elsewhere_are_prepared_once(here: Path) -> None:
    (prepared,) = (here / "root" / "prepared").iterdir()
    (here / "other").mkdir()
    shutil.copy(here / "d.npz", here / "other" / "e.npz")
    assert main.main(["c.yaml", "data.path=other/e.npz"]) == 0
    assert [*(here / "root" / "prepared").iterdir()] == [prepared]
    write_data(here / "other" / "e.npz", 2)  # of the same size and time
    assert main.main(["c.yaml", "data.path=other/e.npz", "--fresh"]) == 0
    assert len([*(here / "root" / "prepared").iterdir()]) == 2


def test_two_folders_with_one_output_do_not_take_each_others_result(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"output={tmp_path / 'common'}"
    assert main.main(["c.yaml", output]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    write_data(elsewhere / "d.npz", 2)
    assert main.main([str(here / "c.yaml"), output]) == 1
    assert "this changed: the data" in capsys.readouterr().err
    assert main.main([str(here / "c.yaml"), output, "name=other"]) == 0


def test_only_plugins_whose_methods_are_used_count(here: Path) -> None:
    config = load(Path("c.yaml"), ["plugins=[mine_plugin, mine_observer]"])
    assert used_plugins(config) == ["mine_plugin"]
    assert differences(identity_of(load(Path("c.yaml"))), identity_of(config)) == []
    assert used_plugins(load(Path("c.yaml"), ["server.weights=uniform"])) == []


def test_the_sources_of_plugins_are_kept_with_the_run(here: Path) -> None:
    kept = sorted(path.relative_to(_run_folder(here)).as_posix() for path in _run_folder(here).glob("plugins/*/*"))
    assert [path.split("/")[0::2] for path in kept] == [["plugins", "mine_helper.py"], ["plugins", "mine_plugin.py"]]
    (plugin,) = _run_folder(here).glob("plugins/*/mine_plugin.py")
    assert plugin.read_text() == PLUGIN


def test_sources_of_a_package_are_its_modules_and_what_they_import(here: Path) -> None:
    package = here / "mine_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("from .. import shared\n")
    (package / "deep" / "method.py").write_text("def f():\n    from ..late import x\n    import numpy, mine_helper\n")
    for name in ("shared", "late", "unrelated"):
        (package / f"{name}.py").write_text("")
    digests = {sources.module_digest("mine_package.deep.method")}
    for name, counts in {
        "shared": True,
        "late": True,
        "__init__": True,
        "deep/__init__": True,
        "unrelated": False,
    }.items():
        (package / f"{name}.py").write_text("# edited\nfrom .. import shared\n" if "deep" in name else "# edited\n")
        _forget()
        digest = sources.module_digest("mine_package.deep.method")
        assert (digest not in digests) == counts, name
        digests.add(digest)
    assert "mine_package" not in sys.modules, "finding sources imports nothing"
    assert sources.module_digest("mine_package.nowhere") == sources.module_digest("nowhere") == ""


def test_an_installed_plugin_does_not_count_what_is_installed_beside_it(here: Path, monkeypatch: Any) -> None:
    site = here / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "mine_installed.py").write_text("import mine_neighbour\n")
    (site / "mine_neighbour.py").write_text("")
    monkeypatch.syspath_prepend(site)
    _forget()
    before = sources.module_digest("mine_installed")
    (site / "mine_neighbour.py").write_text("# edited")
    _forget()
    assert before == sources.module_digest("mine_installed") != ""


def test_what_is_not_known_is_not_compared() -> None:
    known = Identity("1" * 16, {"a": "2" * 16}, "3" * 16)
    assert differences(known, Identity("", {"a": ""}, "3" * 16)) == []
    assert len(differences(known, Identity("0" * 16, {"b": "2" * 16}, "0" * 16))) == 4
    assert Identity("", {"a": ""}, "0" * 16).filled(known) == Identity("1" * 16, {"a": "2" * 16}, "0" * 16)


@pytest.mark.parametrize("content", [None, [], "x", {}, {"data": 1}, {"data": "", "plugins": [], "package": ""}])
def test_only_what_was_written_is_an_identity(content: Any) -> None:
    assert Identity.read(content) is None
    assert Identity.read(json.loads(json.dumps(Identity("1" * 16).to_dict()))) == Identity("1" * 16)


def test_what_earlier_versions_left(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _run_folder(here)
    summary = json.loads((folder / "summary.json").read_text())
    del summary["identity"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert main.main(["c.yaml"]) == 0, "a result that says nothing of its data is believed"
    _stop_after_round_2(here)
    for path in folder.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        del state["identity"], state["client_files"]
        path.write_text(json.dumps(state | {"format": 2}))
    capsys.readouterr()
    assert main.main(["c.yaml"]) == 1, "what nobody knows the data of is not gone on with"
    assert "round 2 does not say what data and sources it was made with" in capsys.readouterr().err
    assert main.main(["c.yaml", "--accept-changes"]) == 0


def test_lost_rounds_of_the_metrics_are_refused_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _stop_after_round_2(here)
    (_run_folder(here) / "metrics.jsonl").unlink()
    assert main.main(["c.yaml"]) == 1
    assert "metrics.jsonl has lost 2 of the 2 rounds before" in capsys.readouterr().err
    assert main.main(["c.yaml", "--accept-changes"]) == 0


def test_the_history_of_starts_survives_what_happens_to_its_file(here: Path) -> None:
    path = _run_folder(here) / "environment.json"
    (first,) = json.loads(path.read_text())["starts"]
    path.write_text(json.dumps({"command": ["as", "earlier", "versions"], "torch": "0.1"}))
    _stop_after_round_2(here)
    assert main.main(["c.yaml"]) == 0
    earlier, _ = json.loads(path.read_text())["starts"]
    assert earlier["command"] == ["as", "earlier", "versions"]
    path.write_text("[" * 100_000)
    _stop_after_round_2(here)
    assert main.main(["c.yaml"]) == 0
    assert len(json.loads(path.read_text())["starts"]) == 1
    assert (path.parent / "environment.damaged.json").read_text().startswith("[[[")
    assert first["identity"] == json.loads(path.read_text())["starts"][0]["identity"]


def test_a_file_is_read_once_by_all_runs_of_a_sweep(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "s.yaml").write_text("config: c.yaml\nseeds: [0, 1, 2, 3]\n")
    made = load(Path("c.yaml")).run_folder()
    for seed in range(1, 4):
        shutil.copytree(made, load(Path("c.yaml"), [f"seed={seed}"]).run_folder())
    os.utime(here / "d.npz")  # this process may have read it before
    digest, content = files.hashlib.sha256, (here / "d.npz").read_bytes()
    read: list[int] = []

    class Counting:
        def __init__(self, text: bytes = b"") -> None:
            self._digest = digest(text)

        def update(self, chunk: bytes) -> None:
            read.append(len(chunk))
            self._digest.update(chunk)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._digest, name)

    monkeypatch.setattr(files.hashlib, "sha256", Counting)
    assert sweep.main(["s.yaml", "--dry-run"]) == 0
    assert read.count(len(content)) == 1
