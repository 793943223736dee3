"""Filters on models and images: thin doors to module_utils/model_sources.py, which says what they take and give."""

from __future__ import annotations

from typing import Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llmops.ascend.plugins.module_utils import model_sources
from ansible_collections.llmops.ascend.plugins.module_utils.model_copy import gigabytes


def model_candidates(path: str, **options) -> list[dict]:
    """Where the model at path may come from, in the order to ask."""
    try:
        return model_sources.candidates(path=path, **options)
    except ValueError as error:
        raise AnsibleFilterError(f"{options['machine']}: {error}") from error


def _answers(results: list[dict]) -> list[dict]:
    """Results of the loop over candidates that asked each for the model, as model_sources takes them."""
    return [{**item["model_candidate"], "answer": item} for item in results]


class FilterModule:
    """The filters, by name."""

    def filters(self) -> dict[str, Callable]:
        """{name: function}"""
        return {
            "gigabytes": gigabytes,
            "image_facts": model_sources.image_facts,
            "model_candidates": model_candidates,
            "model_givers": lambda results: model_sources.givers(_answers(results)),
            "model_ids": model_sources.model_ids,
            "model_not_found": lambda results, machine, path: model_sources.not_found(machine, path, _answers(results)),
            "model_obstacles": lambda states, machine, edited: model_sources.obstacles(machine, states, edited),
            "models_differing": model_sources.differing,
            "models_lacking": model_sources.lacking,
        }
