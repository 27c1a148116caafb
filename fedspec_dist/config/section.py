"""What the sections of a config are made of: strict mappings of known keys, and choices between methods."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from fedspec_dist.config import methods
from fedspec_dist.config.methods import LATER, Family, Method
from fedspec_dist.config.trees import named

# The context in which a config is written down for its fingerprint: without later options that are at their defaults.
DECIDING = "deciding"


class Section(BaseModel):
    """A mapping of known keys, with their defaults; the default of a choice is a bare name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True)

    def at(self, dotted: str) -> Any:
        """What stands at a key below."""
        return reduce(getattr, dotted.split("."), self)

    @model_serializer(mode="wrap")
    def _serialized(self, whole: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = whole(self)
        if info.context != DECIDING:
            return values
        fields = type(self).model_fields
        later = {
            key
            for key in values
            if LATER in fields[key].metadata and values[key] in (fields[key].default, named(fields[key].default))
        }
        return {key: value for key, value in values.items() if key not in later}


def defaults_of(section: type[Section]) -> dict[str, Any]:
    """As a file states them; methods by their names alone, whose own defaults stand in `methods`."""
    stated: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and not issubclass(kind, Choice):
            stated[key] = defaults_of(kind)
        elif not field.is_required():
            stated[key] = deepcopy(field.default)
    return stated


class Choice(Section):
    """A method by its name, with its parameters as further fields."""

    model_config = ConfigDict(validate_default=False)  # a plugin's default may mean what it does not accept

    type: str

    def parameters(self, without: Iterable[str] = ()) -> dict[str, Any]:
        return self.model_dump(exclude={"type", *without})

    if TYPE_CHECKING:  # which parameters there are depends on the method

        def __getattr__(self, name: str) -> Any: ...


Chosen = SerializeAsAny[Choice]  # written down with the parameters of its method


class _ChoiceOf:
    """Checks a bare name, or a mapping with `type`, against the family as it is now: plugins add to the tables."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._models: dict[str, tuple[Method, type[Choice]]] = {}  # with the line that it was made from

    def __call__(self, value: Any) -> Choice:
        value = named(value)
        name = value.get("type") if isinstance(value, dict) else None
        if not isinstance(name, str):
            raise PydanticCustomError("choice_missing", "give a name, or a mapping with a type")
        if name not in self._family.table:
            names = ", ".join(repr(known) for known in self._family.table)
            raise PydanticCustomError("choice_unknown", "allowed: {names}", {"names": names})
        line, (known, model) = self._family.table[name], self._models.get(name, (None, Choice))
        if known is not line:
            model = create_model(  # type: ignore[call-overload]
                name, __base__=Choice, type=(Literal[name], name), **self._family.parameters(name)
            )
            self._models[name] = line, model
        return model.model_validate(value)


def choice(key: str) -> BeforeValidator:
    return BeforeValidator(_ChoiceOf(methods.FAMILIES[key]))


def by_name(name: str) -> Any:
    """The default of a choice, which the check of the whole config turns into one."""
    return Field(name)
