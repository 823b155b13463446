"""Strict YAML and its validation into frozen objects.

Rules that plain YAML lacks: a key is text and stands once; `1e-12` is a number; `on`, `yes` and `010` stay the text that
was written; anchors, aliases and tags are refused, so that a file means what it shows and is no larger than it looks. Every
error is one line: file, field, allowed, got.
"""

import re
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import ConfigError


SHOWN_CHARACTERS = 100  # of a wrong value in an error


class Schema(BaseModel):
    """Base of all configuration objects: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy in which the named fields have other values; `ConfigError` if it would not be legal."""
        return validate(type(self), {**self.model_dump(), **changes}, type(self).__name__)


SchemaT = TypeVar("SchemaT", bound=Schema)


class _StrictLoader(yaml.SafeLoader):
    def compose_node(self, parent, index):
        event = self.peek_event()
        for feature, used in (("an anchor or alias", getattr(event, "anchor", None)), ("a tag", getattr(event, "tag", None))):
            if used is not None:
                raise ConfigError(f"line {event.start_mark.line + 1}: {feature} must not be used, not {used!r}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: a key must be text, not {_shown(key)}")
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in ("tag:yaml.org,2002:null",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> Any:
    """Read one YAML file under the rules above; `ConfigError` names the file and the line."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_yaml(text: str, origin: str) -> Any:
    """Parse YAML text under the rules above; `origin` stands in front of every error."""
    try:
        return yaml.load(text, _StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{origin}: {line}not YAML: {problem}") from None
    except ValueError as error:
        raise ConfigError(f"{origin}: a number cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None


def validate(schema: type[SchemaT], data: Any, origin: str) -> SchemaT:
    """Turn plain data into `schema`; `ConfigError` names the first wrong field, what is allowed and what was got."""
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: must be a mapping with the keys {', '.join(schema.model_fields)}, not {_shown(data)}")
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_first_problem(schema, error)}") from None


def _first_problem(schema: type[BaseModel], error: ValidationError) -> str:
    # A misspelt key is also a missing one; the unknown key says more.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            owner = _schema_at(schema, problem["loc"][:-1])
            return f"{path}: unknown key; known keys are {', '.join(owner.model_fields)}"
        case "missing":
            return f"{path}: missing"
        case "value_error":
            message = str(problem["ctx"]["error"])
            return f"{path}: {message}" if path else message
        case _:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            return f"{path}: {message}, not {_shown(problem['input'])}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _schema_at(schema: type[BaseModel], path: tuple) -> type[BaseModel]:
    for part in path:
        field = schema.model_fields.get(part) if isinstance(part, str) else None
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            schema = field.annotation
    return schema
