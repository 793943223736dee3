"""docs/topologies.md says what placement does now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

GENERATOR = Path(__file__).resolve().parents[2] / "docs" / "generate_topologies.py"


def test_the_page_is_what_the_project_says_now():
    specification = importlib.util.spec_from_file_location("generate_topologies", GENERATOR)
    generator = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.page(), "run docs/generate_topologies.py and look at what changed"
