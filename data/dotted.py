"""Functions by dotted path: the only plug-in mechanism there is."""

import importlib
from collections.abc import Callable
from typing import Any


def resolve(path: str) -> Callable[..., Any]:
    """The function at ``module:name``. Raises ValueError that says which half was not found."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{path!r} does not resolve: {error}; write package.module:function") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")))
        raise ValueError(f"{path!r} does not resolve: {module_name} has no function {name!r}; it has {known}")
    resolved: Callable[..., Any] = function
    return resolved
