"""JSON Schema validation of tool-call arguments, for schemas that come from clients.

Nothing is fetched, whatever a schema refers to; patterns take linear time; and the work has a limit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jsonschema
import llguidance
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry

from perdure import BusyError, GrammarError
from perdure.spi.decode import Vocabulary, checker

_STEPS = 500_000
"""What one validation may cost: references can make a small schema exponential."""
_QUOTED = 1024
"""Characters of the arguments that cost a step whenever a keyword is applied: its error may quote them."""
_steps_left: ContextVar[int] = ContextVar("steps_left")
_each: ContextVar[int] = ContextVar("each")
"""What a keyword costs at least."""

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class SchemaTooComplex(Exception):
    """Validating takes more steps than any tool needs."""


def first_problem(schema: Mapping[str, Any], value: Any) -> ValidationError | None:
    """The most telling way in which `value` does not fit; whatever jsonschema raises for a bad schema."""
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # A registry of our own: jsonschema's default one fetches what it does not know.
    validator = _bounded(draft)(schema, registry=Registry())
    each = _each.set(1 + len(json.dumps(value)) // _QUOTED)
    token = _steps_left.set(_STEPS)
    try:
        problem: ValidationError | None = best_match(validator.iter_errors(value))
        return problem
    finally:
        _steps_left.reset(token)
        _each.reset(each)


@functools.cache
def _bounded(draft: Any) -> Any:
    keywords = {name: _counted(_OURS.get(name, keyword)) for name, keyword in draft.VALIDATORS.items()}
    return jsonschema.validators.extend(draft, keywords)  # type: ignore[no-untyped-call]


def _counted(keyword: Keyword) -> Keyword:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        # A keyword may go through all that it lists, and through all that it is applied to.
        _spend(_each.get() + _length(value) + _length(instance))
        yield from keyword(validator, value, instance, schema) or ()

    return counted


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _spend(steps: int) -> None:
    left = _steps_left.get() - steps
    if left < 0:
        raise SchemaTooComplex(f"it takes more than {_STEPS} steps to check")
    _steps_left.set(left)


@functools.lru_cache(maxsize=64)
def _matcher(pattern: str) -> Any:
    # The engine of structured output: it has no backtracking. None where it does not know the syntax, or
    # where the pattern would end or hold this process.
    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        with checker.turn("", None):
            checker.check("json_schema", schema, Vocabulary(256))
    except (BusyError, GrammarError):
        return None
    native = llguidance.LLMatcher(_bytes(), llguidance.grammar_from("json_schema", schema), log_level=0)
    return None if native.is_error() else native


@functools.cache
def _bytes() -> Any:
    return llguidance.LLTokenizer("byte")


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text. One with look-around is taken to be: nothing linear reads it."""
    try:
        native = _matcher(pattern)
    except ValueError:
        return True
    if native is None:
        return True
    written = list(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))
    native = native.deep_copy()
    matched: int = native.validate_tokens(written)
    return matched == len(written) or bool(native.is_error())


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string"):
        _spend(len(instance) // 16)
    if validator.is_type(instance, "string") and not matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    _spend(len(patterns) * len(instance))
    for pattern, inner in patterns.items():
        for name, value in instance.items():
            if matches(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, inner: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    _spend(len(patterns) * len(instance))
    for name, value in instance.items():
        if name in known or any(matches(pattern, name) for pattern in patterns):
            continue
        if inner is False:
            yield ValidationError(f"Additional properties are not allowed ({name!r} was unexpected)")
        elif validator.is_type(inner, "object"):
            yield from validator.descend(value, inner, path=name)


def _unique_items(validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if unique and validator.is_type(instance, "array"):
        written = [json.dumps(item, sort_keys=True) for item in instance]
        _spend(sum(map(len, written)) // 16)
        seen = set(written)
        if len(seen) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """For what would walk the whole schema anew at each level."""
    yield from ()


_OURS: Mapping[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "unevaluatedProperties": _unchecked,
    "unevaluatedItems": _unchecked,
    "format": _unchecked,
}
