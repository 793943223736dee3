"""The `vllm` command: `vllm serve MODEL ...` and `vllm --version`.

`serve` forks the engine core before it becomes the API server, so that the core stays small. Their life as in vLLM:
the core's death ends the API server with an error; the core ends when the API server is gone, however it went.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

from simulated_vllm import core
from simulated_vllm.arguments import ArgumentsError, Config, parse_serve
from simulated_vllm.channel import Channel
from simulated_vllm.log import Logger

LOG = Logger("APIServer")
USAGE = "usage: vllm [-h] [-v] {serve} ...\n"


def catalogue_path() -> Path:
    """The argument catalogue: the image has one beside the package, a checkout those of the presets."""
    if override := os.environ.get("LLMOPS_LAB_CATALOGUE"):
        return Path(override)
    installed = Path(__file__).parent / "catalogue.json"
    return installed if installed.exists() else Path(__file__).parents[3] / "presets" / "vllm" / "0.23.0.json"


def bind(config: Config) -> socket.socket:
    """The API's socket, bound before the model is loaded so that a taken port fails at once; not listening yet."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    return listener


def serve(config: Config) -> int:
    LOG.info("api_server.py:1272", f"vLLM API server version {config.version} (simulated)")
    try:
        listener = bind(config)
    except OSError as error:
        LOG.raw(f"OSError: [Errno {error.errno}] {error.strerror}: {config.host}:{config.port}")
        return 1
    ours, cores = socket.socketpair()
    core_pid = os.fork()
    if core_pid == 0:
        listener.close()
        ours.close()
        status = 1
        try:
            status = core.main(config, cores)
        finally:
            os._exit(status)
    cores.close()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # while loading; the server sets its own
    try:
        blocks = wait_until_loaded(ours)
    except EOFError:
        LOG.raw("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        os.waitpid(core_pid, 0)
        return 1
    from simulated_vllm import api_server  # late: the core does without asyncio

    return api_server.run(config, listener, ours, core_pid, blocks)


def wait_until_loaded(connection: socket.socket) -> int:
    """Waits for the core's first message; returns its number of cache blocks. Raises EOFError when the core failed."""
    [(_, blocks)] = Channel(connection).receive(None)
    return blocks


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    catalogue = json.loads(catalogue_path().read_text())
    if arguments[:1] in (["--version"], ["-v"]):
        print(catalogue["vllm"])
        return 0
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if arguments[0] != "serve":
        sys.stderr.write(f"{USAGE}vllm: error: argument subparser: invalid choice: '{arguments[0]}' (choose from 'serve')\n")
        return 2
    try:
        config = parse_serve(arguments[1:], catalogue, dict(os.environ))
    except ArgumentsError as error:
        LOG.raw(str(error))
        return 1
    del catalogue
    return serve(config)
