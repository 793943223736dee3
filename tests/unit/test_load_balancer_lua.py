"""The load balancer's Lua modules, each alone, run by tests/lua/run.lua inside a real nginx."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.lua.support import LUA, MODULES, NGINX

HERE = Path(__file__).resolve().parents[1] / "lua"
FILES = sorted(path.stem for path in HERE.glob("test_*.lua"))
TESTS = [
    f"{file}.{name}" for file in FILES for name in re.findall(r"^function T\.(\w+)", (HERE / f"{file}.lua").read_text(), re.M)
]

CONFIGURATION = """
{modules}
daemon off;
pid {here}/pid;
error_log {here}/error.log;
events {{}}
http {{
    lua_package_path "{lua}/?.lua;;";
    lua_shared_dict llmops_state 1m;
    lua_shared_dict llmops_in_flight 1m;
    init_by_lua_block {{
        rawset(_G, "SCRATCH", "{here}")
        dofile("{tests}/run.lua")("{tests}", {{ {files} }})
    }}
}}
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Outcome by test."""
    here = tmp_path_factory.mktemp("lua")
    (here / "nginx.conf").write_text(
        CONFIGURATION.format(
            modules="".join(f"load_module {module};\n" for module in MODULES),
            here=here,
            lua=LUA,
            tests=HERE,
            files=", ".join(f'"{file}"' for file in FILES),
        )
    )
    argv = [NGINX, "-p", str(here), "-e", str(here / "start.log"), "-c", str(here / "nginx.conf")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("test", TESTS)
def test_lua(results, test):
    assert results[test] == "ok"


def test_all_are_run(results):
    assert sorted(results) == sorted(TESTS)
