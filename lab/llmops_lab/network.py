"""The lab's networks: a switch with a management and a data network, and a network namespace per machine.

The switch is a network namespace of its own with one bridge per network. So the host's firewall (Docker's FORWARD policy, say)
has no hand in what machines tell each other, and removing the namespace removes every cable. The host is plugged in with two
interfaces, <lab>-mgmt and <lab>-data, with address .1. Machines have no default route, and whatever is addressed to the range of
the labs (198.18.0.0/15, RFC 2544) but has no interface is unreachable: nothing leaves the host.
"""
from __future__ import annotations

import json
import re

from .host import run
from .settings import Lab, LabError, Machine

RANGE = "198.18.0.0/15"
#: name in the switch and on the host's interfaces -> interface inside a machine
NETWORKS = {"mgmt": "eth0", "data": "eth1"}


def namespace(lab: Lab, machine: Machine | str) -> str:
    """The name of a machine's network namespace, as `ip netns` knows it."""
    return f"{lab.name}-{machine}"


def ensure(lab: Lab, machines: list[Machine]) -> None:
    """Make whatever is missing or half made; mend cables that are cut. Raises LabError when another lab has the same addresses."""
    switch = namespace(lab, "switch")
    ports = _ports(lab)
    if not {f"host-{network}" for network in NETWORKS} <= ports.keys():
        remove(lab)
        _refuse_overlap(lab)
        _make_switch(lab, switch)
        ports = {}
    run("ip", "route", "replace", "unreachable", RANGE)
    for machine in machines:
        if not _plugged_in(lab, machine, ports):
            run("ip", "netns", "delete", namespace(lab, machine), check=False)
            _make_machine(lab, switch, machine)
        mend(lab, machine)


def broken(lab: Lab, machines: list[Machine]) -> list[Machine]:
    """The machines that ensure() would give a new network namespace: what runs in the old one must go first."""
    ports = _ports(lab)
    return [machine for machine in machines if not _plugged_in(lab, machine, ports)]


def cut(lab: Lab, machine: Machine) -> None:
    """Pull both cables of a machine."""
    _batch(namespace(lab, "switch"), *(f"link set {_port(machine, network)} down" for network in NETWORKS))


def mend(lab: Lab, machine: Machine) -> None:
    """Plug both cables of a machine in."""
    _batch(namespace(lab, "switch"), *(f"link set {_port(machine, network)} up" for network in NETWORKS))


def cut_machines(lab: Lab) -> set[str]:
    """The names of the machines that have a cable pulled."""
    return {port.rpartition("-")[0] for port, up in _ports(lab).items() if not up}


def remove(lab: Lab) -> None:
    """Remove every namespace and interface of the lab, and the unreachable route with the last lab."""
    for name in leftovers(lab):
        if name in _namespaces():
            run("ip", "netns", "delete", name)
        else:  # perhaps gone already: the kernel takes it down with its peer in the switch, in its own time
            run("ip", "link", "delete", name, check=False)
    if not any(name.endswith("-switch") for name in _namespaces()):
        run("ip", "route", "delete", "unreachable", RANGE, check=False)


def leftovers(lab: Lab) -> list[str]:
    """The lab's namespaces and interfaces that exist, known by their names."""
    namespaces = [name for name in _namespaces() if re.fullmatch(rf"{lab.name}-(switch|machine\d+)", name)]
    interfaces = [link["ifname"] for link in json.loads(run("ip", "-json", "link"))]
    return namespaces + [name for name in interfaces if name in {f"{lab.name}-{network}" for network in NETWORKS}]


def _refuse_overlap(lab: Lab) -> None:
    for interface in json.loads(run("ip", "-json", "-4", "address")):
        for address in interface["addr_info"]:
            theirs = address.get("local", "").rpartition(".")[0]
            if theirs in (lab.management, lab.data) and not interface["ifname"].startswith(f"{lab.name}-"):
                raise LabError(f"{interface['ifname']} already has {address['local']}: choose another name than LAB={lab.name}")


def _make_switch(lab: Lab, switch: str) -> None:
    run("ip", "netns", "add", switch)
    _batch(switch, *(f"link add name {network} up type bridge forward_delay 0" for network in NETWORKS))
    for network, prefix in zip(NETWORKS, (lab.management, lab.data)):
        _batch(
            None,
            f"link add name {lab.name}-{network} type veth peer name host-{network} netns {switch}",
            f"address add {prefix}.1/24 dev {lab.name}-{network}",
            f"link set {lab.name}-{network} up",
        )
        _batch(switch, f"link set host-{network} master {network} up")


def _make_machine(lab: Lab, switch: str, machine: Machine) -> None:
    name = namespace(lab, machine)
    run("ip", "netns", "add", name)
    _batch(name, "link set lo up")
    for (network, interface), prefix in zip(NETWORKS.items(), (lab.management, lab.data)):
        _batch(
            name,
            f"link add name {interface} type veth peer name {_port(machine, network)} netns {switch}",
            f"address add {prefix}.{machine.number}/24 dev {interface}",
            f"link set {interface} up",
        )
        _batch(switch, f"link set {_port(machine, network)} master {network}")


def _plugged_in(lab: Lab, machine: Machine, ports: dict[str, bool]) -> bool:
    return namespace(lab, machine) in _namespaces() and {_port(machine, network) for network in NETWORKS} <= ports.keys()


def _ports(lab: Lab) -> dict[str, bool]:
    """The switch's ports that are wired to a bridge, which is the last step of making one, and whether they are up."""
    if namespace(lab, "switch") not in _namespaces():
        return {}
    links = json.loads(run("ip", "-json", "-n", namespace(lab, "switch"), "link"))
    return {link["ifname"]: "UP" in link["flags"] for link in links if "master" in link}


def _port(machine: Machine, network: str) -> str:
    """The switch's end of a machine's cable: "machine66-mgmt" (15 characters at most, the kernel's limit, up to machine254)."""
    return f"{machine}-{network}"


def _namespaces() -> list[str]:
    return [entry["name"] for entry in json.loads(run("ip", "-json", "netns", "list") or "[]")]


def _batch(name: str | None, *commands: str) -> None:
    """Run `ip` commands in one go, in a network namespace or on the host."""
    where = ("-n", name) if name else ()
    run("ip", *where, "-batch", "-", input="\n".join(commands) + "\n")
