"""A busy server's descriptors: what is gone is passed over, what stays is seen every time."""
from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from ansible_collections.llmops.ascend.plugins.module_utils.processes import open_files


def test_a_descriptor_that_closes_meanwhile_hides_no_other(monkeypatch):
    real, calls = os.readlink, []

    def readlink(path):
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)
    with socket.create_server(("127.0.0.1", 0)) as server:
        inode = os.fstat(server.fileno()).st_ino
        assert f"socket:[{inode}]" in set(open_files(Path("/proc/self")))


def test_a_listener_is_seen_while_connections_come_and_go():
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        def churn():
            while not stop.is_set():
                pairs = [socket.socketpair() for _ in range(20)]
                for pair in pairs:
                    pair[0].close()
                    pair[1].close()

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            wanted = f"socket:[{os.fstat(server.fileno()).st_ino}]"
            assert all(wanted in set(open_files(Path("/proc/self"))) for _ in range(200))
        finally:
            stop.set()
            thread.join()


def test_a_process_that_is_gone_has_nothing_open():
    assert list(open_files(Path("/proc/999999999"))) == []
