#!/usr/bin/env python3
"""Build an engine image of the lab and push it into a registry: `build.py simulated --registry 198.18.254.1:5000`.

Prints the references that were pushed. What is in the cache is not built again, what is in the registry not sent again.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmops_lab.settings import LabError  # noqa: E402

from images import oci  # noqa: E402

# What a kind of engine needs; the module's IMAGES are references without a registry -> function that builds the layout.
KINDS = {"simulated": "images.simulated", "vllm": "images.vllm_cpu"}


def build(kind: str, registry: str | None) -> list[str]:
    """Builds the images of a kind ("simulated" or "vllm") and pushes them to HOST:PORT if given; returns the references.

    Raises LabError.
    """
    references = []
    for name, ensure in importlib.import_module(KINDS[kind]).IMAGES.items():
        layout = ensure()
        if registry:
            oci.push(layout, f"{registry}/{name}")
        references.append(f"{registry}/{name}" if registry else str(layout))
    return references


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--registry", metavar="HOST:PORT", help="plain HTTP registry to push to; only built when left out")
    arguments = parser.parse_args()
    os.nice(10)  # a build may take its time, the lab's machines may not
    try:
        for reference in build(arguments.kind, arguments.registry):
            print(reference)
    except LabError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
