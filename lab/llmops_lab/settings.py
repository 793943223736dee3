"""Names, addresses and paths of one lab, all derived from its name alone, so that they are found again after any crash."""
from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
STATE = Path("/var/lib/llmops-lab")
RUN = Path("/run/llmops-lab")
CACHE = Path(os.environ.get("LLMOPS_LAB_CACHE", "/var/cache/llmops-lab"))

DEFAULT_NAME = "lab"
DEFAULT_MACHINES = "machine66-69"
DEFAULT_ENGINE_IMAGE = "simulated"
USER = "ops"


class LabError(Exception):
    """Something the person at the keyboard can act on; the message is one line."""


@dataclass(frozen=True, order=True)
class Machine:
    """A machine of a lab. Its number is the last octet of both of its addresses."""

    number: int

    def __str__(self) -> str:
        return f"machine{self.number}"

    @classmethod
    def named(cls, name: str) -> Machine:
        """"machine66" -> Machine(66). Raises LabError for anything else."""
        match = re.fullmatch(r"machine(\d{1,3})", name)
        if not match or not 2 <= int(match[1]) <= 254:
            raise LabError(f"{name!r} is no machine: names run from machine2 to machine254, ranges like machine66-69 work too")
        return cls(int(match[1]))


def parse_machines(text: str) -> list[Machine]:
    """"machine66,machine68-69" -> machines 66, 68 and 69, sorted. Raises LabError for names that cannot be."""
    machines: set[Machine] = set()
    for part in filter(None, text.replace(" ", ",").split(",")):
        first, _, last = part.partition("-")
        start = Machine.named(first)
        end = Machine.named("machine" + last.removeprefix("machine")) if last else start
        if end < start:
            raise LabError(f"the range {part} runs backwards")
        machines.update(map(Machine, range(start.number, end.number + 1)))
    return sorted(machines)


@dataclass(frozen=True)
class Lab:
    """One lab. Networks are management (where Ansible and clients come in) and data (where models travel)."""

    name: str

    @classmethod
    def from_environment(cls) -> Lab:
        """The lab that the variable LAB names. Raises LabError when that is no usable name."""
        name = os.environ.get("LAB") or DEFAULT_NAME
        if not re.fullmatch(r"[a-z][a-z0-9]{0,9}", name):
            raise LabError(f"LAB={name}: a lab's name has 1 to 10 lower-case letters and digits, as network interfaces carry it")
        return cls(name)

    @property
    def _slot(self) -> int:
        """0 for the default lab, else 1 to 100. Derived, not handed out: inventory/lab derives the same in Jinja, from LAB alone."""
        return 0 if self.name == DEFAULT_NAME else int(hashlib.md5(self.name.encode()).hexdigest()[:4], 16) % 100 + 1

    @property
    def management(self) -> str:
        """The first three octets of the management network."""
        return f"198.18.{254 - self._slot}"

    @property
    def data(self) -> str:
        """The first three octets of the data network."""
        return f"198.18.{11 + self._slot}"

    @property
    def host_address(self) -> str:
        """The host's own address in the management network, where the lab's services listen."""
        return f"{self.management}.1"

    @property
    def apt_url(self) -> str:
        return f"http://{self.host_address}:8081/"

    @property
    def registry(self) -> str:
        return f"{self.host_address}:5000"

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def artifacts(self) -> Path:
        return self.state / "artifacts"

    @property
    def ssh_key(self) -> Path:
        return self.state / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.state / "ssh" / "known_hosts"

    def directory(self, machine: Machine) -> Path:
        """Where a machine's disks and console log are kept."""
        return self.state / "machines" / str(machine)

    def machines(self) -> list[Machine]:
        """The machines that have disks, running or not."""
        return sorted(Machine.named(path.name) for path in (self.state / "machines").glob("machine*"))

    def existing(self, text: str) -> list[Machine]:
        """Parse a list of machines that must all be in the lab. Raises LabError for one that is not."""
        machines = parse_machines(text)
        for machine in machines:
            if machine not in self.machines():
                raise LabError(f"{machine} is not in the lab {self.name!r}: `lab/lab up --machines {machine}` adds it")
        return machines

    def environment(self) -> dict[str, str]:
        """What tests and other programs need to know of the lab."""
        return {
            "LAB": self.name,
            "LLMOPS_LAB_MANAGEMENT": self.management,
            "LLMOPS_LAB_DATA": self.data,
            "LLMOPS_LAB_STATE": str(self.state),
            "LLMOPS_LAB_CACHE": str(CACHE),
            "LLMOPS_LAB_REGISTRY": self.registry,
        }
