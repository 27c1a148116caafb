"""YAML text to plain values and back. What would take all memory or no end of time is refused before it does.

Nothing here knows what the keys mean.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_MAX_MESSAGE = 1900
_MAX_SHOWN = 160
_MAX_CHARACTERS = 100_000
_MAX_ENTRIES = 10_000
_MAX_KEYS = 2_000
_MAX_DEPTH = 24
_MAX_WHOLE = 10**300  # a float takes it
_MAX_KEY = 200


class ConfigError(ValueError):
    """A config that cannot run; the message is for the person who typed it.

    `everywhere`: every rank finds the same, so that one of them says it. Otherwise it depends on the host.
    """

    def __init__(self, message: str, everywhere: bool = True) -> None:
        super().__init__(_cut(message, _MAX_MESSAGE))
        self.everywhere = everywhere


def _cut(text: str, limit: int) -> str:
    """Both ends of a long text: the key stands in front, and what to do about it at the end."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]}[... {len(text) - limit} characters ...]{text[-tail:]}"


def shown(value: Any) -> str:
    """What was given, as it stands in a message."""
    try:
        text = str(value) if isinstance(value, Path) else repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        text = f"a value of type {type(value).__name__} that is too long to be shown"
    return shortened(text)


def shortened(text: str) -> str:
    """Words of others, as they stand in a message."""
    return _cut(text, _MAX_SHOWN)


# ------------------------------------------------------------------------------------------ YAML

_FLOAT, _INT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
_BOOL, _WORD = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
_MERGE, _TIMESTAMP = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
_KNOWN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with repairs: `1e-3` and `-.5` are numbers, `0123`, `1:30` and `2024-01-01` are words, so is `on` as a
    key, and a key given twice is an error."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._entries = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._entries += 1
        _check_amount(self._entries, self._depth)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_KEYS:  # merge keys of merge keys grow as aliases of aliases do
            raise ConfigError(f"got a mapping of more than {_MAX_KEYS:,} keys")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == _MERGE:
                continue
            if key_node.tag == _BOOL and key_node.value not in ("true", "false"):
                key_node.tag = _WORD
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"{shown(key)}: a key is a name{key_node.start_mark}")
            if key in seen:
                raise ConfigError(f"{shown_key(key)}: given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: a name such as `1e3` is quoted."""


def _repair(kind: Any) -> None:
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _INT, _TIMESTAMP)]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"^[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$")
    kind.add_implicit_resolver(_FLOAT, number, list("-+0123456789."))
    kind.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789"))


_repair(_Loader)
# Dates, sets, bytes and the like, which a tag could still ask for, are no values of a config.
_Loader.yaml_constructors = {tag: f for tag, f in yaml.SafeLoader.yaml_constructors.items() if tag in {None, *_KNOWN}}
_repair(_Dumper)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """A word that other readers of YAML would take for a number or a date (`0123`, `1:30`) is quoted."""
    word = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False)) == _TEXT
    return dumper.represent_scalar(_TEXT, text, style=None if word else "'")


_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(str, _text)


def dump(content: Mapping[str, Any]) -> str:
    """As YAML that `read` gives back."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, width=110)


def read(path: Path) -> dict[str, Any]:
    """The mapping in a file, at most 100,000 characters of it.

    Raises:
        ConfigError: there is no such file, or it is no YAML, or something that no config needs.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read as a config: {error.strerror or 'no such file'}") from None
    except ValueError as error:  # bytes that are no text; a path with a NUL
        raise ConfigError(f"{shown(path)}: cannot be read as a config: {shown(error)}") from None
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{shown(path)}: {error}") from None


def parse(text: str) -> dict[str, Any]:
    """The mapping that a text of YAML stands for.

    Raises:
        ConfigError: as `read`.
    """
    try:
        content = _load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {_cut(str(error), 600)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"a config is a mapping of keys to values, got {type(content).__name__}")
    return content


def split(override: str) -> tuple[str, Any]:
    """Key and value of `key=value`.

    Raises:
        ConfigError: it has another form, or the value is no YAML.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{shown(override)}: an override is key=value, for example local.lr=0.1")
    if "/" in key:
        raise ConfigError(f"{shown(override)}: is no file that exists, nor an override, whose key has no slash")
    if len(key) > _MAX_KEY or (problem := _problem_of(key)):
        reason = f"at most {_MAX_KEY} characters" if len(key) > _MAX_KEY else problem
        raise ConfigError(f"{shown(key)}: is no key of a config; allowed: {reason}")
    try:
        return key, _load(text)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {shown(text)} is not a YAML value") from None


def _load(text: str) -> Any:
    """The content; what aliases refer to is there once for each of them, so that changing one changes no other.

    Raises:
        ConfigError: too much of something.
        yaml.YAMLError: no YAML.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"got more than {_MAX_CHARACTERS:,} characters; allowed: a text shorter than that")
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ConfigError):
        raise
    except Exception as error:  # whatever a constructor makes of `!!int ''` and its like
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None
    return _Copy().of(content)


def _check_amount(entries: int, depth: int) -> None:
    if entries > _MAX_ENTRIES:
        raise ConfigError(f"got more than {_MAX_ENTRIES:,} entries, aliases counted as what they stand for")
    if depth > _MAX_DEPTH:
        raise ConfigError(f"got lists or mappings nested too deep; allowed: {_MAX_DEPTH} levels")


class _Copy:
    """A copy without shared parts, that stops at the limits: a few aliases of aliases stand for billions of entries."""

    def __init__(self) -> None:
        self._entries = 0

    def of(self, value: Any, depth: int = 1) -> Any:
        self._entries += 1
        _check_amount(self._entries, depth)
        if isinstance(value, dict):
            return {self.of(key, depth): self.of(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item, depth + 1) for item in value]
        if isinstance(value, str) and (problem := _problem_of(value)):
            raise ConfigError(f"got {shown(value)}; allowed: {problem}")
        if type(value) is int and abs(value) >= _MAX_WHOLE:
            raise ConfigError("got a whole number that is too long; allowed: up to 300 digits")
        return value


def _problem_of(text: str) -> str:
    """What is allowed, where a text has something else: paths, consoles and job scripts end at such characters."""
    odd = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in text)
    return "one line of text, without control characters and lone surrogates" if odd else ""


def shown_key(key: str) -> str:
    """A key as it stands in a message; one that no config has may be long or odd."""
    return key if len(key) <= _MAX_KEY and not _problem_of(key) else shown(key)
