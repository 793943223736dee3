"""The project holds what it says of itself: argument specs equal defaults, addresses stay inside the lab, documentation is there."""
from __future__ import annotations

import ipaddress
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
LAB = ipaddress.ip_network("198.18.0.0/15")


def load(path: Path):
    return yaml.safe_load(path.read_text()) or {}


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_equal_defaults(role):
    """Every default is specified with the same value. A template may say in words what its spec says in data, so those are skipped."""
    defaults = load(ROOT / "roles" / role / "defaults" / "main.yml")
    options: dict = {}
    for entry in load(ROOT / "roles" / role / "meta" / "argument_specs.yml")["argument_specs"].values():
        options.update(entry.get("options", {}))
    assert sorted(set(defaults) - set(options)) == []
    for name, value in defaults.items():
        if "{{" not in str(value):
            assert options[name].get("default") == value, name
    shared = {"services", "deployments", "resolved_deployments", "artifacts_directory", "max_unavailable"}
    assert sorted(name for name, option in options.items() if name not in defaults and not option.get("required") and name not in shared
                  and name.startswith(role + "_") and "default" in option) == []


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_whole(role):
    for name in ("README.md", "meta/main.yml", "tasks/main.yml", "defaults/main.yml"):
        assert (ROOT / "roles" / role / name).is_file(), name
    assert (ROOT / "molecule" / role / "converge.yml").is_file()


@pytest.mark.parametrize("inventory", sorted(path.name for path in (ROOT / "inventory").glob("lab*")))
def test_lab_inventories_name_no_address_outside_the_lab(inventory):
    for path in sorted((ROOT / "inventory" / inventory).rglob("*.yml")):
        for address in re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", path.read_text()):
            assert ipaddress.ip_address(address) in LAB, f"{path}: {address}"


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("[a-z]*.py")))
def test_a_module_is_documented(module):
    text = (ROOT / "plugins" / "modules" / f"{module}.py").read_text()
    blocks = {name: yaml.safe_load(block) for name, block in re.findall(r'^(DOCUMENTATION|RETURN) = r"""\n(.*?)"""', text, re.DOTALL | re.MULTILINE)}
    assert set(blocks["DOCUMENTATION"]["attributes"]) >= {"check_mode", "diff_mode", "idempotent"}
    assert blocks["RETURN"] and "EXAMPLES" in text
    assert blocks["DOCUMENTATION"]["module"] == module


def test_nothing_simulated_lives_outside_the_lab():
    tracked = subprocess.run(["git", "ls-files", "plugins", "roles", "playbooks", "presets"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [name for name in tracked.stdout.split() if "simulated" in (ROOT / name).read_text(errors="replace").lower()]
    assert found == []
