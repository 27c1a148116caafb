"""What makes a run the same run besides its config: the data's content, the plugins' and this package's sources.

A run's checkpoints and summary say what they were made with. Whoever finds them compares that with what is there now,
and goes on, or takes the result for its own, only if nothing changed or the user accepts it. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedspec_dist.config import Config, ConfigError, expand_home, methods
from fedspec_dist.core.failures import Kind
from fedspec_dist.data.files import content_digest, digest
from fedspec_dist.runs.branch import source_checkpoint
from fedspec_dist.runs.folder import RunFolder, checkpoints_in, write_json
from fedspec_dist.runs.safe_files import read_object
from fedspec_dist.runs.sources import DIGITS, module_digest, package_digest


class ChangedError(ValueError):
    """The folder's results were made with other data or other sources; the message says which, and what to do."""

    kind = Kind.CHANGED


@dataclass(frozen=True)
class Identity:
    """Digests; an empty one is not known here: the data may lie on other hosts only, or not be downloaded yet."""

    data: str = ""
    plugins: Mapping[str, str] = field(default_factory=dict)  # module -> digest, of those that the config uses
    package: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def filled(self, before: Identity) -> Identity:
        """With what `before` knew in place of what is not known here."""
        plugins = {module: digest or before.plugins.get(module, "") for module, digest in self.plugins.items()}
        return Identity(self.data or before.data, plugins, self.package or before.package)

    @staticmethod
    def read(content: Any) -> Identity | None:
        """What `to_dict` gave; None for anything else."""
        if not isinstance(content, dict) or content.keys() != {"data", "plugins", "package"}:
            return None
        data, plugins, package = content["data"], content["plugins"], content["package"]
        if not isinstance(plugins, dict) or not all(map(_is_digest, [data, package, *plugins.values()])):
            return None
        return Identity(data, plugins, package)


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) in (0, DIGITS)


def identity_of(config: Config, with_data: bool = True) -> Identity:
    """As things are now. The data are read once a process, however many configs name them."""
    plugins = {module: module_digest(module) for module in used_plugins(config)}
    if config.model.type == "torchvision" and config.model.pretrained is not None:
        plugins["model.pretrained"] = _digest_of_weights("model.pretrained", config.model.pretrained)
    if config.init is not None:
        plugins["init"] = _digest_of_init(config)
    return Identity(data_digest(config) if with_data else "", plugins, package_digest())


def _digest_of_init(config: Config) -> str:
    """Of the weights that a run starts from; empty where they are not there (any more)."""
    assert config.init is not None
    try:
        if config.init.weights is not None:
            return _digest_of_weights("init.weights", config.init.weights)
        state = read_object(source_checkpoint(config) / "state.json")
        listed = state.get("files")
        model = listed.get("model.safetensors") if isinstance(listed, dict) else None
        return str(model.get("sha256"))[:DIGITS] if isinstance(model, dict) else ""
    except (OSError, ConfigError):
        return ""


def _digest_of_weights(key: str, path: str) -> str:
    """Of a file; empty where it is not there."""
    try:
        return digest(expand_home(key, path))[:DIGITS]
    except (OSError, ConfigError):
        return ""


def used_plugins(config: Config) -> list[str]:
    """The modules with the methods of plugins that the config uses; a plugin that only observes is none of them."""
    chosen = [("data.dataset", config.data.dataset), ("data.partition", config.data.partition), ("model", config.model)]
    chosen += [("clients.attack", config.clients.attack), ("task", config.task)]
    for phase in config.schedule():
        chosen += [("local.algorithm", phase.local.algorithm), ("local.optimizer", phase.local.optimizer)]
        chosen.append(("filter", phase.filter))
        for key in methods.FAMILIES:
            section, _, name = key.partition(".")
            if section == "server":
                choices = getattr(phase.server, name)
                chosen += [(key, choice) for choice in (choices if isinstance(choices, list) else [choices])]
    targets = [methods.FAMILIES[key].table[choice.type].target for key, choice in chosen]
    if any(key.startswith("server.") and not methods.FAMILIES[key].table[c.type].is_ours for key, c in chosen):
        # Which statistics they use, their classes say, which are not loaded here.
        targets += [entry.target for entry in methods.STATISTICS.values()]
    if config.model.type == "module":
        targets.append(config.model.path)
    return sorted({target.partition(":")[0] for target in targets if not target.startswith(".")})


def data_source(config: Config) -> Any:
    """What reads the data set of a config."""
    data = config.data
    entry = methods.DATASETS[data.dataset.type]
    # An embedded data set needs no folder, and so no home directory, which containers may lack.
    root = Path(data.root) if getattr(entry.load(), "embedded", False) else expand_home("data.root", data.root)
    return entry.build(root=root, download=data.download, seed=config.seed, **data.dataset.parameters())


def data_digest(config: Config) -> str:
    """Of the content; empty where that cannot be told: what is wrong, whoever loads the data says."""
    try:
        return content_digest(config.data.dataset.type, data_source(config))
    except Exception:  # a login node may lack both the files and torch, and a user's own may raise anything
        return ""


# ------------------------------------------------------------------------------------------ before and now


@dataclass(frozen=True)
class Recorded:
    """What the newest results in a run folder say of themselves."""

    round: int
    finished: bool
    identities: tuple[Identity, ...]  # made with the first one, the others accepted since; none: they do not say


def recorded(folder: RunFolder) -> Recorded | None:
    """By the summary of a finished run, else by the newest checkpoint that says anything; None before the first."""
    if (summary := folder.ended()) is not None:
        accepted = summary.get("accepted")
        said = [summary.get("identity"), *(accepted if isinstance(accepted, list) else [])]
        known = tuple(identity for identity in map(Identity.read, said) if identity is not None)
        return Recorded(_whole(summary.get("rounds")), True, known)
    for path in checkpoints_in(folder.checkpoints):
        state = read_object(path / "state.json")
        identity = Identity.read(state.get("identity"))
        if identity is not None or ("identity" not in state and type(state.get("format")) is int):
            return Recorded(_whole(state.get("round")), False, () if identity is None else (identity,))
    return None


def _whole(number: Any) -> int:
    return number if type(number) is int else 0


def settle(folder: RunFolder, now: Callable[[], Identity], accept: bool) -> list[str]:
    """Compare the results in a folder with what is there now; what changed and was accepted, in words.

    Raises:
        ChangedError: something changed, and nobody accepts it.
    """
    found = recorded(folder)
    if found is None:
        return []
    if found.finished and not found.identities:
        return []  # made by a version that did not say; there is nothing to go on with
    identity = now()
    changed = min((differences(before, identity) for before in found.identities), key=len, default=None)
    since = f"it finished after round {found.round}" if found.finished else f"round {found.round}"
    accepted = accept_or_refuse(folder, since, changed, accept)
    if accepted and found.finished:
        # The result stays what it is, made with what it was made with; that it is taken all the same is added.
        known = [*found.identities[1:], identity.filled(found.identities[0])]
        summary = folder.ended() or {}
        write_json(folder.summary, summary | {"accepted": [each.to_dict() for each in known]})
    return accepted


def accept_or_refuse(folder: RunFolder, since: str, changed: list[str] | None, accept: bool) -> list[str]:
    """`changed`: since when the results were made; None where they do not say with what.

    Raises:
        ChangedError: see `settle`.
    """
    if changed is None:
        changed = [f"unknown: what was saved at {since} does not say what data and sources it was made with"]
    if not changed:
        return []
    if accept:
        return changed
    raise ChangedError(
        f"{folder.path} has results of this config, but since {since} this changed: {'; '.join(changed)}. Start over "
        "with --fresh, or keep them and give this run another name= or output=; --accept-changes takes them as they "
        "are, goes on, and writes that down"
    )


def differences(before: Identity, now: Identity) -> list[str]:
    """What changed, in words; what is not known on one side is not compared."""
    changed = [("the data", before.data, now.data)]
    for module in sorted({*before.plugins, *now.plugins}):
        then, today = (identity.plugins.get(module, "none") for identity in (before, now))
        weights = module in ("init", "model.pretrained")
        changed.append((f"the weights of {module}" if weights else f"the plugin {module}", then, today))
    changed.append(("the sources of fedspec_dist", before.package, now.package))
    return [f"{what} (then {then}, now {today})" for what, then, today in changed if then and today and then != today]
