"""perdure: a runtime for local language models whose sessions last.

The public names are those of `__init__.pyi`. Each is imported when it is asked for: the command starts,
answers `--help` and hears Ctrl-C before the engine is loaded, and a program loads only what it uses. A name
of an extension that is not there does not exist.
"""

# Type checkers know the name. To import `typing` takes longer than all else before the command hears Ctrl-C,
# and until then Python answers that with a traceback.
TYPE_CHECKING = False

__version__ = "0.1.0"

if not TYPE_CHECKING:
    _modules = {}

    def _public():
        """The module of each public name."""
        if not _modules:
            import ast
            import os

            with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as stub:
                tree = ast.parse(stub.read(1 << 20))
            for node in tree.body:
                if isinstance(node, ast.ImportFrom):
                    _modules.update((name.name, node.module) for name in node.names)
        return _modules

    def _is_here(module):
        """Whether a module can be found: that of an extension may not be, or lack what it needs."""
        from importlib.util import find_spec

        if module.startswith("perdure.ext."):
            from perdure.extension import extensions

            return module.split(".")[2] in extensions()
        try:
            return find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    def __getattr__(name):
        from importlib import import_module

        if not name.startswith("_") and _is_here(f"perdure.{name}"):
            return import_module(f"perdure.{name}")
        if name == "__all__":
            extensions = {module for module in _public().values() if module.startswith("perdure.ext.")}
            missing = {module for module in extensions if not _is_here(module)}
            return sorted([*(each for each in _public() if _public()[each] not in missing), "__version__"])
        module = None if name.startswith("_") else _public().get(name)
        if module is None or (module.startswith("perdure.ext.") and not _is_here(module)):
            raise AttributeError(f"module 'perdure' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(module), name)
        return value

    def __dir__():
        return [*__getattr__("__all__"), "__doc__", "__file__", "__name__", "__path__"]
