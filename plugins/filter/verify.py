"""Filters of the role verify: doors to module_utils.verification and module_utils.expectations.

backend_targets and service_targets say what is to be asked, verify_keys with which keys (secret), verify_rows what
came of it, verify_report, verify_tables and unmet_lines show it; unmet_expectations judges any answers by any expectations.
"""

from __future__ import annotations

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llmops.ascend.plugins.module_utils import expectations, verification
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain
from ansible_collections.llmops.ascend.plugins.module_utils.tables import table

COLUMNS = {
    "machine": "machine",
    "instance": "instance",
    "service": "service",
    "devices": "devices",
    "numa_nodes": "numa node",
    "port": "port",
    "health": "health",
    "name": "name",
    "checks": "checks",
    "seconds": "seconds",
    "backend": "backend",
    "sessions": "sessions",
    "share": "share",
}
"""All columns of the tables of verify, in their order; a table has those its rows know."""


def verify_tables(report: dict[str, Any]) -> list[str]:
    """A report as lines of text: a table of backends, one of services, one of how sessions spread, and the sum."""
    parts = [verify_table(report[part]) for part in ("backends", "services", "distribution")]
    lines = [line for part in parts if part for line in [*part, ""]]
    return [*lines, f"{report['met']} of {report['asked']} expectations met"]


def verify_table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of backends, of services or of a distribution as lines of text."""
    known = {key: title for key, title in COLUMNS.items() if any(key in row for row in rows)}
    if "instance" in known:
        known.pop("service", None)  # the instance's name says it
    return table(rows, known)


def unmet_expectations(
    answers: dict[str, Any], wanted: list[dict[str, Any]], expected: dict[str, Any]
) -> list[dict[str, str]]:
    """The expectations `answers` does not meet: [{name, message}]."""
    return expectations.judge(answers, expected, wanted)["unmet"]


def _door(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a filter: it sees plain data, and a fault in an expectation fails the task without a traceback."""

    def filtered(*args: Any, **options: Any) -> Any:
        try:
            return function(*map(plain, args), **{name: plain(value) for name, value in options.items()})
        except ValueError as error:
            raise AnsibleFilterError(f"An expectation cannot be evaluated: {error}. Correct it.") from error

    return filtered


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        functions = {
            "backend_targets": verification.backend_targets,
            "service_targets": verification.service_targets,
            "unmet_expectations": unmet_expectations,
            "unmet_lines": verification.unmet_lines,
            "verify_keys": verification.keys,
            "verify_report": verification.report,
            "verify_rows": verification.rows,
            "verify_table": verify_table,
            "verify_tables": verify_tables,
        }
        return {name: _door(function) for name, function in functions.items()}
