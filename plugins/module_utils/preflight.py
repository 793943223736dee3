"""What stands in the way of a machine's instances, from what the machine shows of itself.

Everything here is pure: the module machine_preflight reads the files and runs the tools, these functions read their text and
compare it with what is wanted. A finding is {level: error | warning, check, message, remedy}, each part one line.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from dataclasses import dataclass
from typing import Any, Iterable, Mapping

LISTEN = "0A"
"""State TCP_LISTEN in /proc/net/tcp (include/net/tcp_states.h)."""

CONTAINER_ID = re.compile(r"(?:docker|libpod|cri-containerd)[-/]([0-9a-f]{64})")
UNIT = re.compile(r"^(?:.*/)?([^/]+\.service)(?:/.*)?$")


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket: its address, port and the inode that a process's file descriptor names."""

    address: str
    port: int
    inode: int


@dataclass(frozen=True)
class Process:
    """Who holds something: its pid, its name, the systemd unit and the container it runs in, where there is one."""

    pid: int
    name: str
    unit: str | None = None
    container: str | None = None

    def __str__(self) -> str:
        place = [f"unit {self.unit}"] if self.unit else []
        place += [f"container {self.container}"] if self.container else []
        return f"{self.name} (pid {self.pid}{''.join(', ' + part for part in place)})"


def finding(level: str, check: str, message: str, remedy: str) -> dict[str, str]:
    """One thing that stands in the way."""
    return {"level": level, "check": check, "message": message, "remedy": remedy}


def listeners(text: str, byte_order: str = "<") -> list[Listener]:
    """Read /proc/net/tcp or /proc/net/tcp6 (kernel Documentation/networking/proc_net_tcp.rst).

    Addresses are 32-bit words in the machine's own byte order ("<" little endian, as struct says it), ports are big endian.
    Mapped IPv4 addresses are returned as IPv4. Lines that are no sockets, such as the header, are passed over.
    """
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or fields[3] != LISTEN:
            continue
        words, _colon, port = fields[1].partition(":")
        values = [int(words[i : i + 8], 16) for i in range(0, len(words), 8)]
        packed = b"".join(struct.pack(byte_order + "I", value) for value in values)
        address = ipaddress.ip_address(packed)
        if address.version == 6 and address.ipv4_mapped:
            address = address.ipv4_mapped
        found.append(Listener(str(address), int(port, 16), int(fields[9])))
    return found


def local_addresses(fib_trie: str, if_inet6: str = "") -> list[str]:
    """A machine's own addresses: /proc/net/fib_trie (its `/32 host LOCAL` leaves) and /proc/net/if_inet6."""
    found, leaf = [], None
    for line in fib_trie.splitlines():
        text = line.strip()
        if text.startswith("|-- "):
            leaf = text[4:]
        elif text == "/32 host LOCAL" and leaf is not None and leaf not in found:
            found.append(leaf)
    for line in if_inet6.splitlines():
        digits = line.split()[0] if line.split() else ""
        if len(digits) == 32:
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def cgroup_place(text: str) -> tuple[str | None, str | None]:
    """The systemd unit and the container id that /proc/PID/cgroup tells of, each None where it tells of none.

    Lines are `HIERARCHY:CONTROLLERS:PATH` (cgroups(7)). Docker with the systemd driver uses `docker-ID.scope`, with cgroupfs
    `/docker/ID`; podman and containerd name theirs alike. The innermost service counts.
    """
    unit = container = None
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        match = CONTAINER_ID.search(path)
        container = container or (match.group(1) if match else None)
        match = UNIT.match(path)
        unit = unit or (match.group(1) if match else None)
    return unit, container


def address_findings(wanted: Iterable[Mapping[str, str]], present: Iterable[str]) -> list[dict[str, str]]:
    """Addresses that are to be this machine's and are not: `wanted` is [{variable, address}]."""
    present = list(present)
    known = {str(ipaddress.ip_address(address)) for address in present}
    return [
        finding(
            "error",
            "address",
            f"{want['variable']} {want['address']} is not an address of this machine, which has "
            + ", ".join(a for a in present if not ipaddress.ip_address(a).is_loopback),
            f"set {want['variable']} to one of these in the machine's inventory",
        )
        for want in wanted
        if str(ipaddress.ip_address(want["address"])) not in known
    ]


def port_findings(
    wanted: Iterable[Mapping[str, Any]], held: Mapping[Listener, Process | None], ours: Iterable[str]
) -> list[dict[str, str]]:
    """Wanted ports that a foreign process holds.

    `wanted` is [{port, address, purpose, unit}]; `held` maps listeners to their processes (None: not to be seen); `ours` are the
    units and containers (by name) that this project made, who may pass ports among themselves.
    """
    ours = set(ours)
    findings = []
    for want in wanted:
        for listener, process in sorted(held.items(), key=lambda item: (item[0].port, item[0].address)):
            if listener.port != want["port"] or not _overlap(listener.address, want["address"]):
                continue
            if process is not None and {process.unit, process.container} & (ours | {want["unit"]}):
                continue
            holder = str(process) if process is not None else "a process that cannot be seen from here"
            findings.append(
                finding(
                    "error",
                    "port",
                    f"port {want['port']} of {want['purpose']} is held by {holder} on {listener.address}",
                    "stop it, or choose another port in the inventory (first_port of a deployment, listen_port of a service)",
                )
            )
            break
    return findings


def name_findings(
    names: Iterable[str], units: Mapping[str, str], containers: Mapping[str, bool]
) -> list[dict[str, str]]:
    """Names of instances that hand-made units or containers already bear.

    `units` maps names to the path of a unit file that is not ours, `containers` maps container names to whether they are.
    """
    findings = []
    for name in names:
        if name in units:
            findings.append(
                finding(
                    "error",
                    "name",
                    f"unit {name}.service exists and is not ours: {units[name]}",
                    "adopt or retire it: stop it and move its file away, or give the deployment another name",
                )
            )
        if containers.get(name) is False:
            findings.append(
                finding(
                    "error",
                    "name",
                    f"container {name} exists and is not ours",
                    f"adopt or retire it: `docker rm -f {name}` once nothing needs it, or give the deployment another name",
                )
            )
    return findings


def disk_findings(wanted: Iterable[Mapping[str, Any]], free: Mapping[str, tuple[str, int]]) -> list[dict[str, str]]:
    """File systems with too little room.

    `wanted` is [{path, free_mb, purpose, settled}]; `free` maps a path to (mount point, free MiB). What is wanted of one file
    system adds up. Where all of it is settled (what would need the room is there already) a full file system is a warning.
    """
    by_mount: dict[str, list[Mapping[str, Any]]] = {}
    for want in wanted:
        by_mount.setdefault(free[want["path"]][0], []).append(want)
    findings = []
    for mount, wants in sorted(by_mount.items()):
        open_wants = [want for want in wants if not want["settled"]] or wants
        needed, there = sum(want["free_mb"] for want in open_wants), free[wants[0]["path"]][1]
        if there >= needed:
            continue
        purposes = " and ".join(f"{want['purpose']} ({want['path']})" for want in open_wants)
        findings.append(
            finding(
                "warning" if open_wants is wants and wants[0]["settled"] else "error",
                "disk",
                f"{mount} has {there} MiB free, of {needed} MiB wanted for {purposes}",
                "free space, or mount a larger file system there",
            )
        )
    return findings


def node_findings(instances: Iterable[Mapping[str, Any]], present: Iterable[str]) -> list[dict[str, str]]:
    """Device nodes that placed instances are to be given and that are not there."""
    present = set(present)
    findings = []
    for instance in instances:
        missing = [node for node in instance["device_nodes"] if node not in present]
        if missing and instance.get("state", "placed") == "placed":
            findings.append(
                finding(
                    "error",
                    "device node",
                    f"{', '.join(missing)} of {instance['name']} is not there",
                    "see whether the driver is loaded (`npu-smi info`, `dmesg | grep -i davinci`) and reboot if it was just installed",
                )
            )
    return findings


def architecture_findings(architecture: str, supported: Iterable[str]) -> list[dict[str, str]]:
    """A processor that no driver, engine or image is made for."""
    supported = list(supported)
    if architecture in supported:
        return []
    return [
        finding(
            "error",
            "architecture",
            f"the processor is {architecture}; drivers and images exist for {' and '.join(supported)}",
            "take the machine out of group workers",
        )
    ]


def _overlap(listening: str, wanted: str) -> bool:
    """Whether a socket on `listening` keeps another from listening on `wanted`: equal, or one of them stands for all.

    `::` takes IPv4 with it unless told otherwise, which /proc does not show: better a finding too many.
    """
    one, other = ipaddress.ip_address(listening), ipaddress.ip_address(wanted)
    if one == other:
        return True
    if one.is_unspecified or other.is_unspecified:
        return one.version == other.version or (one if one.version == 6 else other).is_unspecified
    return False
