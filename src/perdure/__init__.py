"""perdure: a runtime for local language models whose sessions last.

The public names are those of `perdure.public`. They are imported when the first of them is asked for, so that
the command starts, answers `--help` and hears Ctrl-C before the engine is loaded.
"""

# Type checkers know the name. To import `typing` takes longer than all else before the command hears Ctrl-C,
# and until then Python answers that with a traceback.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from perdure.public import *  # noqa: F403
    from perdure.public import __all__ as __all__

__version__ = "0.1.0"

if not TYPE_CHECKING:

    def __getattr__(name):
        import importlib
        from importlib.util import find_spec

        if not name.startswith("_") and find_spec(f"perdure.{name}") is not None:
            return importlib.import_module(f"perdure.{name}")
        public = importlib.import_module("perdure.public")
        if name == "__all__":
            return sorted([*public.__all__, "__version__"])
        if name not in public.__all__:
            raise AttributeError(f"module 'perdure' has no attribute {name!r}")
        return getattr(public, name)

    def __dir__():
        return [*__getattr__("__all__"), "__doc__", "__file__", "__name__", "__path__"]
