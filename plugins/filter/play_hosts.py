"""The hosts of a play, and this collection's filters loaded where every worker process finds them."""

from __future__ import annotations

import pkgutil

from ansible.plugins.loader import filter_loader
from ansible_collections.llmops.ascend.plugins import filter as filters


def play_hosts(pattern: str) -> str:
    """`pattern`, unchanged.

    A play's `hosts` is the one place that Ansible's main process itself evaluates. Its workers are forked from it for every
    task and host, and each would read and compile the filters and their libraries anew: a third of the time of a run.
    What is loaded here, once, they all inherit.
    """
    for module in pkgutil.iter_modules(filters.__path__):
        filter_loader.get(f"llmops.ascend.{module.name}")
    return pattern


class FilterModule:
    """Ansible's door."""

    def filters(self) -> dict:
        return {"play_hosts": play_hosts}
