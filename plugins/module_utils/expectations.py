"""Judge answers by expectations that are data.

An expectation is a dictionary:

    name     what is expected, in a few words
    expect   JMESPath over {"answers": ..., "expected": ...}; met when its value is true in JMESPath's sense
    message  what to say otherwise; every {JMESPATH} in it is replaced by its value
    level    "full" (default): only for answers of that level; "brief": always
    when     JMESPath; the expectation applies only where it is true (default: always)
    decisive true: when it is not met the ones after it would only repeat that, and are left out

JMESPath is specified at jmespath.org. An expression that meets a value of the wrong type (a sum of strings, say) counts as
not met: the answer was malformed. An expression that is no JMESPath is a fault of the expectation and raises ValueError.

Used on the controller only: jmespath is not asked of the machines.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterable, Mapping

import jmespath
import jmespath.exceptions

PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
SHOWN_CHARACTERS = 160


def judge(
    answers: Mapping[str, Any], expected: Mapping[str, Any], expectations: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Hold `answers` against `expectations`.

    Returns {asked: int, met: int, unmet: [{name, message}]}. `asked` counts the expectations that apply, so that an endpoint
    which fails a decisive one early still shows how much is open.
    """
    document = {"answers": answers, "expected": expected}
    asked, met, unmet, decided = 0, 0, [], False
    for expectation in expectations:
        if not _applies(expectation, document):
            continue
        asked += 1
        if decided:
            continue
        if _is_true(_value(expectation["expect"], document)):
            met += 1
            continue
        unmet.append({"name": expectation["name"], "message": _filled(expectation["message"], document)})
        decided = bool(expectation.get("decisive"))
    return {"asked": asked, "met": met, "unmet": unmet}


def _applies(expectation: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    if expectation.get("level", "full") == "full" and document["answers"].get("level") != "full":
        return False
    return "when" not in expectation or _is_true(_value(expectation["when"], document))


def _value(expression: str, document: Mapping[str, Any]) -> Any:
    try:
        return jmespath.search(expression, document)
    except jmespath.exceptions.JMESPathTypeError:
        return None
    except jmespath.exceptions.JMESPathError as error:
        raise ValueError(f"{expression!r} is no JMESPath: {error}") from error


def _is_true(value: Any) -> bool:
    """JMESPath's truth: false are null, false and everything empty; 0 is true."""
    return not (value is None or value is False or value in ("", [], {}))


def _filled(message: str, document: Mapping[str, Any]) -> str:
    return PLACEHOLDER.sub(lambda match: _shown(_value(match.group(1), document)), message)


def _shown(value: Any) -> str:
    """A value within a one-line message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
