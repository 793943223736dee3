"""Filters: whether deployments fit on the devices of a machine, and the table of it."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping

from ansible_collections.llmops.ascend.plugins.module_utils import fit
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain


def fit_verdicts(deployments: Mapping[str, Any], models: Mapping[str, Any], accelerators: Mapping[str, Any],
                 machine: str = "") -> list[dict[str, Any]]:
    """A verdict (module_utils.fit.verdict, with `machine`) for each resolved deployment whose model was read.

    `models` maps a model_path to what module_utils.model_files.read_model gave there, `accelerators` are the machine's facts.
    """
    models, accelerators = plain(models), plain(accelerators)
    return [{**fit.verdict(models[deployment["model_path"]], deployment, fit.device_of(accelerators.get("devices") or [], deployment)),
             "machine": machine or None}
            for deployment in plain(deployments or {}).values() if deployment["model_path"] in models]


def fit_table(verdicts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Verdicts as lines of a table."""
    return fit.fit_table(plain(list(verdicts)))


class FilterModule:
    """Ansible's door."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"fit_verdicts": fit_verdicts, "fit_table": fit_table}
