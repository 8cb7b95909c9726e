"""Recipe tables checked against pydantic models; an error is one line with the full key and the nearest valid one."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError, create_model

from data.config import Config

Model = TypeVar("Model", bound=BaseModel)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def without(model: type[BaseModel], filled: Sequence[str], **extra: Any) -> type[Config]:
    """``model`` less the fields that the graph fills in, plus ``extra`` ones (name = (type, default))."""
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in model.model_fields.items() if name not in filled
    }
    made: type[Config] = create_model(f"{model.__name__}Section", __base__=Config, **fields, **extra)
    return made


def validate(model: type[Model], table: Mapping[str, Any], where: Sequence[str], source: str) -> Model:
    """Raises ValueError with one line for the first fault: source, full key, what is wrong, what would be right.

    As strict as JSON is about types: neither "3" nor true is a number.
    """
    try:
        return model.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        fault = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        parts = [str(part) for part in fault["loc"] if part != "[key]"]
        path = dotted([*where, *parts])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        if fault["type"] == "extra_forbidden":
            hint = suggest(parts[-1], parts[:-1], model, where)
            raise ValueError(f"{source}: unknown key {path}; {hint}{more}") from None
        if fault["type"] == "missing":
            raise ValueError(f"{source}: {path} is missing; add it{more}") from None
        message = fault["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        raise ValueError(f"{source}: {path} = {fault['input']!r}: {message}{more}") from None


def suggest(key: str, inside: Sequence[str], model: type[BaseModel], where: Sequence[str]) -> str:
    """``did you mean …?`` by name, first among the table's own keys, then among deeper ones; else the valid keys."""
    table = _descend(model, inside)
    if table is None:
        return "there is no such table"
    prefix = [*where, *inside]
    near = difflib.get_close_matches(key, table.model_fields, n=1, cutoff=0.6)
    if near:
        return f"did you mean {dotted([*prefix, near[0]])}?"
    deeper = {path[-1]: path for path in _leaves(model) if len(path) > 1}
    if near := difflib.get_close_matches(key, deeper, n=1, cutoff=0.75):
        return f"did you mean {dotted([*where, *deeper[near[0]]])}?"
    return f"{dotted(prefix) or 'a recipe'} has {', '.join(table.model_fields)}"


def nearest(name: str, names: Sequence[str]) -> str:
    """``did you mean …?`` among free names, or the list of them."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def dotted(parts: Sequence[str]) -> str:
    """A TOML key: parts that are no bare keys are quoted."""
    return ".".join(part if _BARE.fullmatch(part) else f'"{part}"' for part in parts)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new table: ``over`` laid on ``base``, table by table."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _descend(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    annotation: Any = model
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(part)
            annotation = field.annotation if field is not None else None
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _leaves(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (name,)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ((name, *rest) for rest in _leaves(field.annotation))
