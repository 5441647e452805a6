"""The public names and how they are called, compared with `api.txt`: a change of them is seen, and meant.

After a change that is meant, `python tests/test_api.py` writes the file again; docs/policy.md says what else is due.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from importlib.util import find_spec
from pathlib import Path

from public_names import MODULES, PARTLY

FILE = Path(__file__).parent / "api.txt"
PLAIN = (bool, int, float, str, bytes, type(None))
BUILT_IN = ("__call__", "__getitem__", "__iter__", "__len__")  # of the special methods, those that a user calls


def parameters(called: object) -> str:
    """'(x, y=None, *, task)': names, kinds and defaults, without types; a default that is an object is '...'."""
    try:
        found = inspect.signature(called)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"

    def short(parameter: inspect.Parameter) -> inspect.Parameter:
        default = parameter.default
        known = default is parameter.empty or isinstance(default, PLAIN) or default == ()
        return parameter.replace(annotation=parameter.empty, default=default if known else ...)

    text = str(found.replace(parameters=map(short, found.parameters.values()), return_annotation=found.empty))
    return text.replace("=Ellipsis", "=...")


def constructor(one: type) -> str:
    """How a class is called; nothing of a protocol, or where Python's own constructor is used."""
    own = any("__init__" in vars(owner) or "__new__" in vars(owner) for owner in one.__mro__ if ours(owner))
    return parameters(one) if own and not getattr(one, "_is_protocol", False) else ""


def ours(one: type) -> bool:
    return one.__module__.partition(".")[0] == "evcl"


def members(one: type, public: set[type]) -> list[str]:
    """The public methods and properties of a class, except those of a base that is listed itself."""
    found: dict[str, str] = {}
    for owner in one.__mro__:
        if not ours(owner) or any(owner in base.__mro__ for base in one.__mro__[1:] if base in public):
            continue
        for name, value in vars(owner).items():
            if name in found or (name.startswith("_") and name not in BUILT_IN):
                continue
            if isinstance(value, (classmethod, staticmethod)):
                found[name] = f"{name}{parameters(value.__func__)}"
            elif isinstance(value, types.FunctionType):
                found[name] = f"{name}{parameters(value)}"
            elif isinstance(value, property) or inspect.isdatadescriptor(value):
                found[name] = name
    return sorted(found.values())


def described(module: str, name: str, value: object, public: set[type]) -> list[str]:
    full = f"{module}.{name}"
    if isinstance(value, types.ModuleType):
        return [f"{full}: module"]
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__mro__[1:] if base in public)
        first = f"class {full}{constructor(value)}{f' of {bases}' if bases else ''}"
        return [first, *(f"    {one}" for one in members(value, public))]
    if inspect.isroutine(value):
        return [f"{full}{parameters(value)}"]
    return [full if callable(value) else f"{full}: {type(value).__name__}"]


def unimported(module: str, names: list[str]) -> list[str]:
    """What can be said of a module that may not be imported here: from its text."""
    source = find_spec(module)
    assert source
    assert source.origin
    tree = ast.parse(Path(source.origin).read_text("utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in names:
            made = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
            found.append(f"class {module}.{node.name}({_arguments(made) if isinstance(made, ast.FunctionDef) else ''})")
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            found.append(f"{module}.{node.name}({_arguments(node)})")
    assert len(found) == len(names), f"{module} should have {names}"
    return sorted(found)


def _arguments(function: ast.FunctionDef) -> str:
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(function.args).removeprefix("self, ").removeprefix("self")


def public() -> str:
    """The text of the file."""
    named = {module: sorted(importlib.import_module(module).__all__) for module in MODULES}
    named |= {module: names for module, names in PARTLY.items() if not module.startswith("evcl.integrations.")}
    values = {module: {name: getattr(importlib.import_module(module), name) for name in names if name != "__version__"}
              for module, names in named.items()}  # fmt: skip
    classes = {value for found in values.values() for value in found.values() if inspect.isclass(value)}
    lines: list[str] = []
    for module, found in values.items():
        lines += [line for name, value in found.items() for line in described(module, name, value, classes)]
        lines.append("")
    for module, names in PARTLY.items():
        if module not in named:
            lines += unimported(module, names)
    return "\n".join(lines) + "\n"


def test_the_public_names_are_those_of_the_file():
    now, before = public().splitlines(), FILE.read_text("utf-8").splitlines()
    gone = [line for line in before if line not in now]
    new = [line for line in now if line not in before]
    why = "if this is meant: python tests/test_api.py, a line in CHANGELOG.md, and see docs/policy.md"
    assert (gone, new) == ([], []), why
    assert now == before, why


if __name__ == "__main__":
    FILE.write_text(public(), "utf-8", newline="\n")
