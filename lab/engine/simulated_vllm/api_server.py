"""The API server's process, from a loaded engine core to the end."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]  # asyncio does without it, and it is a third of its memory

import asyncio  # noqa: E402

from simulated_vllm.api import API  # noqa: E402
from simulated_vllm.arguments import Config  # noqa: E402
from simulated_vllm.client import ENGINE_DEAD, EngineClient  # noqa: E402
from simulated_vllm.http_server import Server  # noqa: E402
from simulated_vllm.log import Logger  # noqa: E402
from simulated_vllm.metrics import Metrics  # noqa: E402
from simulated_vllm.settings import SettingsFile  # noqa: E402

LOG = Logger("APIServer")
LAST_WORDS_S = 0.3  # for answers that tell clients why


def run(config: Config, listener: socket.socket, core: socket.socket, core_pid: int, blocks: int) -> int:
    """Serves until SIGTERM (returns 0) or the core's death (returns 1)."""
    return asyncio.run(_run(config, listener, core, core_pid, blocks))


async def _run(config: Config, listener: socket.socket, core: socket.socket, core_pid: int, blocks: int) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics(config.served_names[0], config.max_model_len, config.block_size, blocks)
    engine = await EngineClient.connect(core, metrics)
    server = Server(API(config, SettingsFile(), engine).handle)
    await server.start(listener)
    LOG.info("api_server.py:500", f"Starting vLLM API server 0 on http://{config.host}:{config.port}")
    LOG.raw(f"INFO:     Started server process [{os.getpid()}]")
    LOG.raw("INFO:     Waiting for application startup.")
    LOG.raw("INFO:     Application startup complete.")

    stopped, died = loop.create_task(stop.wait()), loop.create_task(engine.dead.wait())
    await asyncio.wait((stopped, died), return_when=asyncio.FIRST_COMPLETED)
    server.stop_listening()
    if died.done():
        LOG.error("core_client.py:638", "Engine core proc EngineCore died unexpectedly, shutting down client.")
        LOG.raw(f"vllm.v1.engine.exceptions.EngineDeadError: {ENGINE_DEAD}")
        status = 1
    else:
        await _drain(config, engine)
        status = 0
    await _wait_while(lambda: server.busy, LAST_WORDS_S)
    server.close_connections()
    engine.close()
    await asyncio.sleep(0)
    os.waitpid(core_pid, 0)
    LOG.raw(f"INFO:     Finished server process [{os.getpid()}]")
    return status


async def _drain(config: Config, engine: EngineClient) -> None:
    """Lets requests in flight finish for --shutdown-timeout seconds, then ends them."""
    timeout = config.shutdown_timeout_s
    mode = "drain" if timeout else "abort"
    LOG.info("launcher.py:146", f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout}s")
    await _wait_while(lambda: engine.in_flight and not engine.dead.is_set(), timeout)
    if engine.in_flight:
        LOG.info("core.py:1506", f"[shutdown] EngineCore: aborting in-flight requests count={engine.in_flight}")
        engine.abort_all()


async def _wait_while(condition: Callable[[], object], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while condition() and loop.time() < end:
        await asyncio.sleep(0.02)
