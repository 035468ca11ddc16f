"""Names of a package that are imported when they are first used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__` (PEP 562), which imports names from their modules.

    So the help of a command need not wait for JAX, which takes seconds to import.

    **Arguments:**

    - `package`: the `__name__` of the package.
    - `modules`: the module that defines each name.
    """

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return import_name
