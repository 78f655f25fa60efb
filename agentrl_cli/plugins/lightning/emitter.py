"""Emitters: an agent reports on itself, as spans of the running attempt."""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter

from agentrl_cli.plugins.lightning.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_OPERATION,
    LightningSpanAttributes,
    RewardPydanticModel,
    check_attributes_sanity,
    filter_and_unflatten_attributes,
    flatten_attributes,
    format_exception_attributes,
    sanitize_attributes,
)
from agentrl_cli.plugins.lightning.spans import (
    Span,
    SpanCoreFields,
    SpanRecordingContext,
    StatusCode,
    TraceStatus,
)
from agentrl_cli.plugins.lightning.tracer import DummyTracer, Tracer, get_active_tracer

F = TypeVar("F", bound=Callable[..., Any])
NAMES = LightningSpanAttributes


def _tracer(propagate: bool) -> Tracer:
    tracer = get_active_tracer() if propagate else DummyTracer()
    if tracer is None:
        raise RuntimeError(
            "No active tracer found: spans are emitted while a runner or trace_context runs."
        )
    return tracer


def _emit(
    name: str,
    attributes: dict[str, Any],
    more: dict[str, Any] | None,
    propagate: bool,
    code: StatusCode | None = "OK",
) -> SpanCoreFields:
    found = attributes | sanitize_attributes(flatten_attributes(more or {}))
    status = None if code is None else TraceStatus(status_code=code)
    return _tracer(propagate).create_span(name, attributes=found, status=status)


def emit_annotation(annotation: dict[str, Any], propagate: bool = True) -> SpanCoreFields:
    """Emit attributes of your own. Raises RuntimeError outside an attempt, ValueError for values that no span has."""
    flat = flatten_attributes(annotation)
    check_attributes_sanity(flat)
    return _emit(AGL_ANNOTATION, sanitize_attributes(flat), None, propagate)


def emit_reward(
    reward: float | dict[str, Any],
    *,
    primary_key: str | None = None,
    attributes: dict[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Emit a reward; of several, by name, the primary one is trained on.

    Raises TypeError, ValueError, RuntimeError.
    """
    if not isinstance(reward, (dict, int, float)):
        raise TypeError(f"Reward must be a number, got: {type(reward)}")
    named = reward if isinstance(reward, dict) else {"primary": reward}
    for key, value in named.items():
        if not isinstance(value, (int, float)):
            raise ValueError(f"Reward value must be a number, got: {type(value)} for key {key}")
    if isinstance(reward, dict):
        if primary_key not in reward:
            raise ValueError(f"primary_key must be one of {list(reward)}, not {primary_key!r}.")
        named = {primary_key: reward[primary_key], **reward}
    dimensions = [{"name": name, "value": float(value)} for name, value in named.items()]
    return emit_annotation(
        {NAMES.REWARD.value: dimensions, **(attributes or {})}, propagate=propagate
    )


def emit_message(
    message: str, attributes: dict[str, Any] | None = None, propagate: bool = True
) -> None:
    """Emit a text."""
    if not isinstance(message, str):
        raise TypeError(f"Message must be a string, got: {type(message)}.")
    _emit(AGL_MESSAGE, {NAMES.MESSAGE_BODY.value: message}, attributes, propagate, code=None)


def emit_object(
    object: Any, attributes: dict[str, Any] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Emit a plain value, bytes, or a JSON value. Raises RuntimeError for anything else."""
    kind = type(object).__name__
    if isinstance(object, bytes):
        held = {NAMES.OBJECT_LITERAL.value: base64.b64encode(object).decode()}
    elif isinstance(object, (str, int, float, bool)):
        held = {NAMES.OBJECT_LITERAL.value: str(object)}
    else:
        try:
            held = {NAMES.OBJECT_JSON.value: json.dumps(object)}
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"Object must be JSON serializable, got: {type(object)}.") from error
        kind = (
            kind if type(object).__module__ == "builtins" else f"{type(object).__module__}.{kind}"
        )
    return _emit(AGL_OBJECT, {NAMES.OBJECT_TYPE.value: kind, **held}, attributes, propagate)


def emit_exception(
    exception: BaseException, attributes: dict[str, Any] | None = None, propagate: bool = True
) -> None:
    """Emit an exception that was caught."""
    if not isinstance(exception, BaseException):
        raise TypeError(f"Expected a BaseException instance, got: {type(exception)}.")
    _emit(AGL_EXCEPTION, format_exception_attributes(exception), attributes, propagate)


def get_message_value(span: Span) -> str | None:
    """Return the text of a message's span; None for another span."""
    found: str | None = span.attributes.get(NAMES.MESSAGE_BODY.value)
    return found


def get_object_value(span: Span) -> Any:
    """Return the value of an object's span; None for another span."""
    held = span.attributes
    if NAMES.OBJECT_JSON.value in held:
        return json.loads(held[NAMES.OBJECT_JSON.value])
    text, kind = held.get(NAMES.OBJECT_LITERAL.value), held.get(NAMES.OBJECT_TYPE.value, "str")
    if text is None:
        return None
    read: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "bool": lambda text: text == "True",
    }
    return {**read, "bytes": base64.b64decode}.get(kind, str)(text)


# --- rewards ----------------------------------------------------------------------------------------------------------


def get_rewards_from_span(span: Span) -> list[RewardPydanticModel]:
    """Return the dimensions of a reward's span, the primary one first."""
    if not any(key.startswith(f"{NAMES.REWARD.value}.") for key in span.attributes or {}):
        return []
    found = filter_and_unflatten_attributes(span.attributes, NAMES.REWARD.value)
    return TypeAdapter(list[RewardPydanticModel]).validate_python(found)


def get_reward_value(span: Span) -> float | None:
    """Return the primary reward of a span; None if it has none. A span of Agent-Lightning 0.2 is read, too."""
    if found := get_rewards_from_span(span):
        return found[0].value
    old = (
        (span.attributes or {}).get("reward")
        if span.name in (AGL_ANNOTATION, NAMES.REWARD.value)
        else None
    )
    return float(old) if isinstance(old, (int, float)) else None


def is_reward_span(span: Span) -> bool:
    """Whether a span has a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[Span]) -> list[Span]:
    """Return those that have one."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the last reward; None if there is none."""
    return next(
        (value for span in reversed(spans) if (value := get_reward_value(span)) is not None), None
    )


def reward(fn: F) -> F:
    """Decorate a function (Agent-Lightning 0.1): its return value is emitted as a reward."""
    return _wrap(fn, lambda *args, **kwargs: contextlib.nullcontext(emit_reward))


# --- operations -------------------------------------------------------------------------------------------------------


class OperationContext:
    """A span around a block (`with operation(…) as op`) or around each call of a function (`@operation`)."""

    def __init__(self, name: str, attributes: dict[str, Any], propagate: bool = True) -> None:
        self.name, self.propagate = name, propagate
        self.initial_attributes = sanitize_attributes(flatten_attributes(attributes))
        self._recording: SpanRecordingContext | None = None

    def __enter__(self) -> OperationContext:
        self._open = _tracer(self.propagate).operation_context(self.name, self.initial_attributes)
        self._recording = self._open.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def span(self) -> SpanCoreFields:
        """Return the span, once it has ended. Raises RuntimeError before."""
        if self._recording is None or not self._recording.end_time:
            raise RuntimeError("Span is not ready yet.")
        return self._recording.get_recorded_span()

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record the inputs."""
        self._set(
            {NAMES.OPERATION_INPUT.value: {**({"args": list(args)} if args else {}), **kwargs}}
        )

    def set_output(self, output: Any) -> None:
        """Record the output."""
        self._set({NAMES.OPERATION_OUTPUT.value: output})

    def _set(self, nested: dict[str, Any]) -> None:
        if self._recording is None:
            raise RuntimeError("The operation has not begun.")
        self._recording.record_attributes(
            sanitize_attributes(flatten_attributes(nested, expand_leaf_lists=True))
        )

    def __call__(self, fn: F) -> F:
        signature = inspect.signature(fn)
        attributes = {NAMES.OPERATION_NAME.value: fn.__name__, **self.initial_attributes}

        @contextlib.contextmanager
        def around(*args: Any, **kwargs: Any) -> Iterator[Callable[[Any], None]]:
            with OperationContext(self.name, attributes, self.propagate) as inner:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                given = {
                    key: list(v) if isinstance(v, tuple) else v
                    for key, v in bound.arguments.items()
                }
                inner._set({NAMES.OPERATION_INPUT.value: given})
                yield inner.set_output

        return _wrap(fn, around)


def operation(
    fn: Callable[..., Any] | None = None,
    *,
    propagate: bool = True,
    name: str | None = None,
    **additional_attributes: Any,
) -> Any:
    """`@operation`, `@operation(key=value)`, or `with operation(key=value) as op:`."""
    if name is not None:
        additional_attributes[NAMES.OPERATION_NAME.value] = name
    made = OperationContext(AGL_OPERATION, additional_attributes, propagate)
    return made if fn is None else made(fn)


def _wrap(
    fn: F, around: Callable[..., contextlib.AbstractContextManager[Callable[[Any], Any]]]
) -> F:
    """Return a function, sync or async, inside `around(*args, **kwargs)`, whose value is called
    with its result.
    """

    @functools.wraps(fn)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs) as returned:
            value = await fn(*args, **kwargs)
            returned(value)
            return value

    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs) as returned:
            value = fn(*args, **kwargs)
            returned(value)
            return value

    return coroutine if inspect.iscoroutinefunction(fn) else function  # type: ignore[return-value]
