"""Which devices, port and cores each instance gets: a pure function of inventory, facts and what already runs.

Two rules, in this order:

1. Stability. An instance that exists keeps its devices as long as the inventory allows them, and its port follows from its
   index. Devices that are sick, quarantined, held by others or gone block their own instance and move nobody: the cut
   is made over all devices, so that a cure changes nothing else.
2. The best cut. New instances are chosen together: the tightest worst links, then the fewest NUMA splits, then the
   tightest links over all; equals are broken towards low ids, so that the answer is always the same.

Everything that follows from devices (HCCL ports, cores) is computed from their ids and not from the number of instances.
"""

from __future__ import annotations

import math
import re
from typing import Any, Iterable, NamedTuple, Sequence

from ansible_collections.llmops.ascend.plugins.module_utils.numa import format_cpu_list, parse_cpu_list
from ansible_collections.llmops.ascend.plugins.module_utils.vllm_cli import render_arguments

# From one die of the same card to another socket. A link nobody knows is taken for the worst. NVIDIA's NV# counts the NVLinks.
LINK_RANKS: dict[str | None, int] = {
    "SIO": 1, "UB": 2, "HCCS": 2, "XLink": 2, "HCCS_SW": 3, "XLink_SW": 3,
    **{f"NV{links}": 1 if links >= 8 else 2 if links >= 2 else 3 for links in range(1, 65)},
    "PIX": 4, "PXB": 5, "PHB": 6, "NODE": 7, "SYS": 8, "NA": 9, None: 9,
}
# Why an instance cannot run, the weightiest first. Only what is weighed by health alone may go on running.
FAULTS = ("quarantined", "driver", "absent", "held", "health")
BLOCKING_HEALTH = ("Alarm", "Critical")
MANAGEMENT_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")

# HCCL opens 16 ports on the host and 16 on the device network for one communicator; these are its own defaults
# (CANN environment reference: HCCL_IF_BASE_PORT, HCCL_NPU_SOCKET_PORT_RANGE). Each instance gets the block of its
# lowest device, so neighbours never meet.
HCCL_HOST_PORT, HCCL_NPU_PORT, HCCL_PORTS = 60000, 16666, 16
# Cores of a node left to the kernel and other programs when instances get cores of their own.
SYSTEM_CORES = 1
# Groups looked at before the search settles for the best cut it has. Machines with regular links need a few dozen, 16
# devices without any pattern in their links up to 100,000.
SEARCH_LIMIT = 100_000


class Device(NamedTuple):
    """What placement needs to know of a device, present or not."""

    id: int
    node: int | None
    cpus: str | None
    path: str
    logic_id: int | None
    card: int | None                     # of a card whose dies only work together, else None
    fault: tuple[str, str] | None        # (kind, reason) of what blocks its instance


# ------------------------------------------------------------------------------------------------------------ the cut

class Cut:
    """Chooses `count` disjoint groups of `size` devices so that their summed cost is least.

    The cost of a group orders by: a device that cannot work, worst link, NUMA split, all its links. Interchangeable devices
    (same node, same links to all others) are tried only once, which keeps machines with regular links tiny at any size.
    The result is exact unless `limited`.
    """

    def __init__(self, devices: dict[int, Device], links: dict[int, dict[int, str]], pool: Iterable[int], size: int) -> None:
        self.pool = sorted(pool)
        self.size = size
        self.limited = False
        self._seen = 0
        self._devices = devices
        self._ranks = {one: {other: LINK_RANKS.get(links.get(one, {}).get(other), 9) for other in self.pool}
                       for one in self.pool}
        self._kinds = self._interchangeable()
        self._memo: dict[tuple[frozenset[int], int], float] = {}
        self._costs: dict[tuple[int, ...], int] = {}
        self._least = self._least_cost()

    @staticmethod
    def _weigh(worst: int, total: int) -> int:
        # 6 bits for each rank and for NUMA splits, so that one worse link outweighs all better ones of up to 63 groups.
        return (1 << (6 * worst + 32)) + min(total, (1 << 18) - 1)

    def _least_cost(self) -> int:
        """What no group can cost less than: each device brings its tightest links."""
        if self.size == 1 or len(self.pool) < self.size:
            return 0
        tightest = [sorted(rank for other, rank in self._ranks[one].items() if other != one)[:self.size - 1]
                    for one in self.pool]
        return self._weigh(min(ranks[-1] for ranks in tightest), -(-self.size * min(map(sum, tightest)) // 2))

    def _interchangeable(self) -> dict[int, int]:
        """For each device the lowest device it could change places with."""
        kinds: dict[int, int] = {}
        for one in self.pool:
            kinds[one] = one
            for other in sorted(set(kinds.values()) - {one}):
                same = (self._devices[one].node == self._devices[other].node
                        and (self._devices[one].fault is None) == (self._devices[other].fault is None)
                        and all(self._ranks[one][third] == self._ranks[other][third]
                                for third in self.pool if third not in (one, other)))
                if same:
                    kinds[one] = other
                    break
        return kinds

    def cost(self, group: tuple[int, ...]) -> int:
        """What a group costs; see the class."""
        known = self._costs.get(group)
        if known is None:
            ranks = [self._ranks[one][other] for index, one in enumerate(group) for other in group[index + 1:]]
            nodes = {self._devices[device].node for device in group} - {None}
            faulty = any(self._devices[device].fault for device in group)
            known = self._costs[group] = (
                (faulty << 100) + ((len(nodes) > 1) << 26) + (self._weigh(max(ranks), sum(ranks)) if ranks else 0))
        return known

    def best(self, count: int) -> list[tuple[int, ...]]:
        """The groups, by their lowest device; fewer than `count` when the pool does not hold them.

        Of equally good cuts it is the one whose groups come first in order.
        """
        count = min(count, len(self.pool) // self.size)
        free = frozenset(self.pool)
        groups: list[tuple[int, ...]] = []
        while count:
            least = self._search(free, count)
            for group in self._groups_with(min(free), free):
                rest = least - self.cost(group)
                if rest >= (count - 1) * self._least and self._search(free - set(group), count - 1) <= rest:
                    groups.append(group)
                    free -= set(group)
                    count -= 1
                    break
            else:
                free = self._without_lowest(free)
        return groups

    def _without_lowest(self, free: frozenset[int]) -> frozenset[int]:
        """The lowest device gets no instance; then none does that could change places with it."""
        kind = self._kinds[min(free)]
        return frozenset(device for device in free if self._kinds[device] != kind)

    def _search(self, free: frozenset[int], count: int) -> float:
        """The least cost of `count` groups out of the free devices; infinite when they do not hold so many."""
        if count == 0:
            return 0
        if len(free) < count * self.size:
            return math.inf
        # Interchangeable devices are always taken lowest first, so the set of free ones is its own canonical form.
        key = (free, count)
        if key in self._memo:
            return self._memo[key]
        best = math.inf
        for group in sorted(self._groups_with(min(free), free), key=self.cost):
            if self.cost(group) + (count - 1) * self._least >= best or (self.limited and best < math.inf):
                break
            best = min(best, self.cost(group) + self._search(free - set(group), count - 1))
        if best > count * self._least and not (self.limited and best < math.inf):
            best = min(best, self._search(self._without_lowest(free), count))
        self._memo[key] = best
        return best

    def _groups_with(self, lowest: int, free: frozenset[int]) -> list[tuple[int, ...]]:
        """All groups of the lowest free device that differ in kind, in order."""
        by_kind: dict[int, list[int]] = {}
        for device in sorted(free - {lowest}):
            by_kind.setdefault(self._kinds[device], []).append(device)
        alike = list(by_kind.values())
        left = [sum(map(len, alike[index:])) for index in range(len(alike) + 1)]
        found: list[tuple[int, ...]] = []

        def extend(chosen: tuple[int, ...], index: int) -> None:
            missing = self.size - len(chosen)
            if missing == 0:
                found.append(tuple(sorted(chosen)))
            elif left[index] >= missing and len(found) < SEARCH_LIMIT:
                for number in range(min(missing, len(alike[index])), -1, -1):
                    extend(chosen + tuple(alike[index][:number]), index + 1)

        extend((lowest,), 0)
        self._seen += len(found)
        self.limited = self._seen > SEARCH_LIMIT
        return sorted(found)


# ----------------------------------------------------------------------------------------------------------- the plan

def place_instances(deployments: dict[str, dict], facts: dict, address: str, machine: str = "",
                    quarantined: Iterable[int] = (), replace: bool = False) -> dict:
    """The instances of one machine: ``{"instances", "findings", "explain", "assumed"}``.

    `deployments` are resolved ones by name, `facts` is ``ansible_facts.accelerators`` (empty before the driver is in), `address`
    is where backends listen, `quarantined` are device ids kept out, `replace` cuts anew, whatever runs.

    An instance is ``{"name", "deployment", "service", "index", "devices", "visible_devices", "address", "port", "numa_nodes", "cpus",
    "link", "hccl_ports", "arguments", "env", "device_nodes", "state": "placed" | "blocked", "reason", "blocked_by"}``.
    `blocked_by` is the kind of the reason: health, quarantined, held, absent or driver. `cpus` is None where nothing is
    bound. `assumed` says that devices were taken from the inventory because the machine shows none yet.
    """
    return _Plan(deployments, facts, address, machine, quarantined, replace).result()


class _Plan:
    """One machine's placement, step by step; `result` runs them in order."""

    def __init__(self, deployments: dict[str, dict], facts: dict, address: str, machine: str,
                 quarantined: Iterable[int], replace: bool) -> None:
        # Fixed numbers and big instances first: what is left to `all` and to small ones depends on them.
        self.deployments = sorted(deployments.values(), key=lambda deployment: (
            deployment["devices"] == "all", deployment["instances"] == "all", -deployment["devices_per_instance"],
            deployment["name"]))
        self.facts = facts
        self.address = address
        self.where = f"{machine}: " if machine else ""
        self.quarantined = set(quarantined)
        self.replace = replace
        self.findings: list[dict] = []
        self.explain: list[str] = []
        self.links = {int(one): {int(other): link for other, link in row.items()}
                      for one, row in (facts.get("links") or {}).items()}
        self.shown = {device["phy_id"]: device for device in facts.get("devices") or [] if device["phy_id"] is not None}
        self.existing: dict[str, dict] = {
            instance["name"]: instance for instance in facts.get("instances") or [] if instance.get("devices")}
        self.nodes = {node["id"]: node for node in facts.get("numa_nodes") or []}
        self.cpu = facts.get("cpu") or {}
        self.assumed = False
        self.dies = 1                                                       # of a card that only works whole
        self.devices: dict[int, Device] = {}
        self.taken: dict[int, str] = {}                                     # device -> instance
        self.kept: dict[str, tuple[int, ...]] = {}
        self.placed: dict[str, dict[int, tuple[int, ...]]] = {}             # deployment -> index -> devices

    def result(self) -> dict:
        self.devices = self._survey()
        pools = self._pools()
        whole = self._whole_cards(pools)
        counts = self._counts(whole)
        self._keep(pools, counts)
        self._cut(whole, counts)
        shares = self._core_shares() if any(one["numa_binding"] == "cores" for one in self.deployments) else {}
        instances = [self._instance(deployment, index, devices, shares)
                     for deployment in sorted(self.deployments, key=lambda deployment: deployment["name"])
                     for index, devices in sorted(self.placed.get(deployment["name"], {}).items())]
        self._check_ports(instances)
        self._explain(instances)
        return {"instances": instances, "findings": self.findings, "explain": self.explain, "assumed": self.assumed}

    def _find(self, level: str, message: str, deployment: dict | None = None) -> None:
        subject = f"deployment {deployment['name']}: " if deployment else ""
        self.findings.append({"level": level, "message": self.where + subject + message})

    # -- which devices there are

    def _wanted_names(self) -> dict[str, tuple[dict, int]]:
        """Present instances that belong to a deployment of this inventory, by name."""
        wanted = {}
        for name in self.existing:
            for deployment in self.deployments:
                index = name[len(deployment["name"]) + 1:]
                if name == f"{deployment['name']}-{index}" and index.isdigit() and index == str(int(index)):
                    wanted[name] = (deployment, int(index))
        return wanted

    def _survey(self) -> dict[int, Device]:
        """All devices to cut over: those shown, and those that ought to be there."""
        expected = max((deployment["expected_devices"] or 0 for deployment in self.deployments), default=0)
        recorded: set[int] = set()
        if not self.replace:
            for name in self._wanted_names():
                recorded |= set(self.existing[name]["devices"])
        if not self.shown and not recorded:
            return self._assume(expected)

        absent = recorded - set(self.shown)
        if not self.shown:
            self._find("error", f"no device is shown: {self.facts.get('reason') or 'the tool lists none'}; what runs is left alone")
        elif expected > len(self.shown):
            missing = set(range(expected)) - set(self.shown)
            numbered = len(missing) == expected - len(self.shown)           # ids 0..N-1: the missing ones have names
            unexplained = sorted(missing - self.quarantined - recorded) if numbered else []
            if numbered:
                absent |= missing
            if unexplained or not numbered:
                missed = f", missing: {_joined(unexplained)}" if unexplained else ""
                self._find("error", f"{len(self.shown)} of {expected} expected devices are there{missed}; repair the machine, "
                           "list the missing in quarantined_devices, or lower expected_devices")
        unknown = sorted(self.quarantined - absent - set(self.shown))
        if unknown:
            self._find("warning", f"quarantined_devices names {_devices(unknown)}, this machine has "
                       f"{format_cpu_list(self.shown) or 'none'}; correct it, or the device you mean stays in use")
        devices, cards = {}, self._cards(absent)
        for number in sorted(set(self.shown) | absent):
            shown = self.shown.get(number)
            devices[number] = Device(
                number, shown and shown.get("numa_node"), shown and shown.get("cpus"),
                (shown and shown.get("node")) or f"/dev/davinci{number}", shown and shown.get("logic_id"), cards.get(number),
                self._fault(number, shown))
        return devices

    def _cards(self, absent: set[int]) -> dict[int, int]:
        """The card of each die that only works together with its sibling: two dies of a 910 on one card, as Atlas A3 has them.

        vllm-ascend's quick start says of Atlas A3 that at least both dies of a card are needed; the two chips of a 310P Duo card are
        independent. An absent die is the sibling of its neighbour where that has lost one (phy id = 2 * card + chip).
        """
        dies: dict[int, list[int]] = {}
        for number, shown in self.shown.items():
            if re.match(r"(Ascend)?910", shown.get("name") or "") and shown.get("npu_id") is not None:
                dies.setdefault(shown["npu_id"], []).append(number)
        self.dies = max(map(len, dies.values()), default=1)
        if self.dies == 1:
            return {}
        cards = {number: card for card, numbers in dies.items() for number in numbers}
        for number in absent:
            card = cards.get(number ^ 1)
            if card is not None and len(dies[card]) < self.dies:
                cards[number] = card
        return cards

    def _assume(self, expected: int) -> dict[int, Device]:
        self.assumed = True
        why = self.facts.get("reason") or "the machine's devices are not known yet"
        listed = [device for deployment in self.deployments if deployment["devices"] != "all"
                  for device in deployment["devices"]]
        counted = sum(deployment["instances"] * deployment["devices_per_instance"] for deployment in self.deployments
                      if deployment["instances"] != "all" and deployment["devices"] == "all")
        number = expected or max([counted] + [device + 1 for device in listed])
        if number:
            hint = "" if expected else " (set expected_devices to say how many)"
            self._find("warning", f"{why}; placement assumes {number} devices{hint}")
        elif self.deployments:
            self._find("warning", f"{why}; nothing is placed (set expected_devices to plan ahead)")
        return {device: Device(device, None, None, f"/dev/davinci{device}", None, None, self._fault(device, {}))
                for device in range(number)}

    def _fault(self, number: int, shown: dict | None) -> tuple[str, str] | None:
        if number in self.quarantined:
            return "quarantined", f"device {number} is in quarantined_devices"
        if shown is None:
            if not self.shown:
                return "driver", f"device {number} is not shown: {self.facts.get('reason') or 'no device is'}"
            return "absent", f"device {number} is not there"
        for holder in shown.get("holders") or []:
            if not holder.get("ours"):
                home = holder.get("container") or holder.get("unit")
                return "held", f"device {number} is held by pid {holder['pid']} ({holder.get('name') or 'name unknown'})" + (
                    f" in {home}" if home else "")
        if shown.get("health") in BLOCKING_HEALTH:
            return "health", f"device {number} is in {shown['health']}"
        return None

    # -- which of them a deployment may use, and for how many instances

    def _pools(self) -> dict[str, set[int]]:
        claimed: dict[int, dict] = {}
        pools: dict[str, set[int]] = {}
        for deployment in self.deployments:
            if deployment["devices"] == "all":
                continue
            pool = set()
            for device in deployment["devices"]:
                if device in claimed:
                    self._find("error", f"device {device} is also claimed by deployment {claimed[device]['name']}; "
                               "give each device to one deployment", deployment)
                elif device not in self.devices:
                    self._find("error", f"device {device} is not on this machine, it has "
                               f"{format_cpu_list(self.devices) or 'none'}; correct `devices`", deployment)
                else:
                    claimed[device] = deployment
                    pool.add(device)
            pools[deployment["name"]] = pool
        for deployment in self.deployments:
            if deployment["devices"] == "all":
                pools[deployment["name"]] = set(self.devices) - set(claimed)
        return pools

    def _whole_cards(self, pools: dict[str, set[int]]) -> dict[str, set[int]]:
        """The pools without dies whose card they do not hold whole: an instance never gets half a card."""
        if self.dies == 1:
            return pools
        cards: dict[int, set[int]] = {}
        for device in self.devices.values():
            if device.card is not None:
                cards.setdefault(device.card, set()).add(device.id)
        whole = {}
        for deployment in self.deployments:
            pool, size = pools[deployment["name"]], deployment["devices_per_instance"]
            usable = {device for dies in cards.values() if len(dies) == self.dies and dies <= pool for device in dies}
            whole[deployment["name"]] = usable
            if size % self.dies:
                whole[deployment["name"]] = set()
                self._find("error", f"an instance of {size} would split a card, whose {self.dies} dies only work together; "
                           f"make tensor_parallel_size a multiple of {self.dies}", deployment)
            elif deployment["devices"] != "all" and usable != pool:
                self._find("error", f"`devices` splits a card, whose dies only work together: {_devices(sorted(pool - usable))} "
                           f"of {format_cpu_list(pool)} without the other; list whole cards", deployment)
        return whole

    def _counts(self, pools: dict[str, set[int]]) -> dict[str, int]:
        counts: dict[str, int] = {}
        left = max((len(pools[deployment["name"]]) for deployment in self.deployments if deployment["devices"] == "all"), default=0)
        for deployment in self.deployments:                     # those with a number come before `all`, see __init__
            size, wanted = deployment["devices_per_instance"], deployment["instances"]
            fixed = deployment["devices"] != "all"
            room = (len(pools[deployment["name"]]) if fixed else left) // size
            count = room if wanted == "all" else min(wanted, room)
            if self.devices and count < (1 if wanted == "all" else wanted):
                asked = f"an instance of {size}" if wanted == "all" else f"{wanted} instances of {size} each"
                there = f"{len(pools[deployment['name']])} in its list" if fixed else f"{len(self.devices)} on the machine"
                others = "" if fixed or left == len(self.devices) else f", {left} of them left by other deployments"
                self._find("error", f"devices for {asked} are asked, there are {there}{others}, room for {room}; "
                           "lower instances or the parallel sizes", deployment)
            counts[deployment["name"]] = count
            if not fixed:
                left -= count * size
        return counts

    # -- who gets what

    def _keep(self, pools: dict[str, set[int]], counts: dict[str, int]) -> None:
        if self.replace:
            return
        for name, (deployment, index) in sorted(self._wanted_names().items(), key=lambda item: (item[1][1], item[0])):
            devices = tuple(sorted(self.existing[name]["devices"]))
            allowed = (index < counts[deployment["name"]] and len(devices) == deployment["devices_per_instance"]
                       and set(devices) <= pools[deployment["name"]])
            rivals = sorted({self.taken[device] for device in devices if device in self.taken})
            if allowed and rivals:
                self._find("warning", f"instance {name} is recorded on devices of {', '.join(rivals)}; it is placed anew")
            elif allowed:
                self._take(deployment, index, devices)
                self.kept[name] = devices

    def _take(self, deployment: dict, index: int, devices: tuple[int, ...]) -> None:
        self.placed.setdefault(deployment["name"], {})[index] = devices
        for device in devices:
            self.taken[device] = f"{deployment['name']}-{index}"

    def _cut(self, pools: dict[str, set[int]], counts: dict[str, int]) -> None:
        # Big instances first: a small one fits anywhere.
        for deployment in sorted(self.deployments, key=lambda deployment: (
                deployment["devices"] == "all", -deployment["devices_per_instance"], deployment["name"])):
            name = deployment["name"]
            missing = [index for index in range(counts[name]) if index not in self.placed.get(name, {})]
            if not missing:
                continue
            units = self._units(pools[name] - set(self.taken))
            dies = max(map(len, units.values()), default=1)
            cut = Cut({one: self._as_one(one, dies_) for one, dies_ in units.items()}, self._unit_links(units), units,
                      deployment["devices_per_instance"] // dies)
            for index, group in zip(missing, cut.best(len(missing))):
                self._take(deployment, index, tuple(sorted(device for one in group for device in units[one])))
            if cut.limited:
                self._find("warning", "the links follow no pattern; a good cut is used, not proven to be the best", deployment)

    def _units(self, pool: set[int]) -> dict[int, tuple[int, ...]]:
        """What is cut over, by its lowest device: devices, or cards with all their dies."""
        together: dict[tuple, list[int]] = {}
        for device in sorted(pool):
            card = self.devices[device].card
            together.setdefault(("device", device) if card is None else ("card", card), []).append(device)
        return {dies[0]: tuple(dies) for dies in together.values()}

    def _as_one(self, one: int, dies: tuple[int, ...]) -> Device:
        """A card as one device: broken when one of its dies is."""
        if len(dies) == 1:
            return self.devices[one]
        return self.devices[one]._replace(fault=next((self.devices[die].fault for die in dies if self.devices[die].fault), None))

    def _unit_links(self, units: dict[int, tuple[int, ...]]) -> dict[int, dict[int, str]]:
        """The worst link between any two dies of two units."""
        if all(len(dies) == 1 for dies in units.values()):
            return self.links

        def worst(one: tuple[int, ...], other: tuple[int, ...]) -> str | None:
            return max((self.links.get(a, {}).get(b) for a in one for b in other), key=lambda link: LINK_RANKS.get(link, 9))

        return {one: {other: worst(units[one], units[other]) for other in units if other != one} for one in units}

    # -- what follows from the devices

    def _core_shares(self) -> dict[int, list[int] | None]:
        """CPUs of each device under `numa_binding: cores`: its node's physical cores, dealt out evenly to its devices."""
        shares: dict[int, list[int] | None] = {}
        for node in self.nodes.values():
            here = [device.id for device in self.devices.values() if device.node == node["id"]]
            threads = [parse_cpu_list(core) for core in node.get("cores") or []]
            if not threads:                                     # the kernel names no cores: each CPU counts as one
                threads = [[cpu] for cpu in parse_cpu_list(node["cpus"])]
            free = self._usable(parse_cpu_list(node["cpus"]))
            threads = [core for core in threads if set(core) <= free]
            if here and len(threads) < len(here):
                self._find("warning", f"NUMA node {node['id']} has {len(threads)} usable cores for {len(here)} devices: "
                           "numa_binding: cores cannot give each its own; their instances share the node")
            spare = SYSTEM_CORES if len(threads) > len(here) else 0
            each = (len(threads) - spare) // len(here) if here else 0
            for position, device in enumerate(here):
                cores = threads[spare + position * each:spare + (position + 1) * each]
                shares[device] = sorted(cpu for core in cores for cpu in core) or None
        return shares

    def _bind(self, deployment: dict, name: str, devices: tuple[int, ...],
              shares: dict[int, list[int] | None]) -> tuple[list[int], str | None]:
        """NUMA nodes and CPUs of an instance; what cannot be known now stays as recorded."""
        binding = deployment["numa_binding"]
        if binding == "none":
            return [], None
        members = [self.devices[device] for device in devices]
        before = self.existing.get(name, {}) if name in self.kept else {}
        if any(member.node is None for member in members):
            return list(before.get("numa_nodes") or []), before.get("cpus")
        homes = sorted({member.node for member in members if member.node is not None})
        lists = {self.nodes[node]["cpus"] for node in self._nearest(homes, "cpus") if self.nodes[node]["cpus"]}
        lists = lists or {member.cpus for member in members if member.cpus}
        nodes = self._nearest(homes, "memory_mb")
        whole = format_cpu_list(self._usable(cpu for cpus in lists for cpu in parse_cpu_list(cpus)))
        if binding == "node":
            return nodes, whole or None
        if any(device.fault and device.fault[0] in ("absent", "driver") for device in self.devices.values()) and before.get("cpus"):
            # A device whose node is unknown now would shift the shares of all others.
            return nodes, before["cpus"]
        own = [shares.get(device) for device in devices]
        if None in own:
            return nodes, whole or None
        return nodes, format_cpu_list(cpu for share in own for cpu in share or [])

    def _usable(self, cpus: Iterable[int]) -> set[int]:
        """Those CPUs that a service may live on and that the scheduler serves (not isolated)."""
        usable = set(cpus)
        if self.cpu.get("allowed"):
            usable &= set(parse_cpu_list(self.cpu["allowed"]))
        return usable - set(parse_cpu_list(self.cpu.get("isolated") or ""))

    def _nearest(self, homes: Sequence[int], what: str) -> list[int]:
        """The nodes that have `what` ("cpus" or "memory_mb"): each home itself, or the nearest that has it by the firmware's distances.

        Unknown memory is taken for memory: kernels that say nothing of it are common, nodes without any are rare.
        """
        having = [number for number, node in self.nodes.items() if node.get(what) not in ("", 0)]
        found = set()
        for home in homes:
            distances = (self.nodes.get(home) or {}).get("distances") or {}
            found.add(home if home in having or home not in self.nodes or not having else
                      min(having, key=lambda number: (distances.get(str(number), 255), number)))
        return sorted(found)

    def _link(self, devices: tuple[int, ...]) -> str | None:
        """The worst link inside an instance; None for one device, or when no link is known."""
        found = [self.links.get(one, {}).get(other) for index, one in enumerate(devices) for other in devices[index + 1:]]
        return max(found, key=lambda link: LINK_RANKS.get(link, 9)) if found and None not in found else None

    def _instance(self, deployment: dict, index: int, devices: tuple[int, ...],
                  shares: dict[int, list[int] | None]) -> dict:
        name = f"{deployment['name']}-{index}"
        members = [self.devices[device] for device in devices]
        faults = [member.fault for member in members if member.fault]
        nodes, cpus = self._bind(deployment, name, devices, shares)
        visible = (range(len(devices)) if deployment["runtime"] == "container" else
                   [member.id if member.logic_id is None else member.logic_id for member in members])
        instance: dict[str, Any] = {
            "name": name,
            "deployment": deployment["name"],
            "service": deployment["service"],
            "index": index,
            "devices": list(devices),
            "visible_devices": ",".join(map(str, visible)),
            "address": self.address,
            "port": deployment["first_port"] + index,
            "numa_nodes": nodes,
            "cpus": cpus,
            "link": self._link(devices),
            "hccl_ports": {
                "host": _ports(HCCL_HOST_PORT, devices[0]),
                "npu": _ports(HCCL_NPU_PORT, devices[0]),
            },
            "device_nodes": [member.path for member in members] + list(MANAGEMENT_NODES) + [
                node for node in deployment["container"]["devices"] if deployment["runtime"] == "container"],
            "state": "blocked" if faults else "placed",
            "reason": "; ".join(reason for _kind, reason in faults) or None,
            "blocked_by": min((kind for kind, _reason in faults), key=FAULTS.index) if faults else None,
        }
        instance["env"] = {**_environment(deployment, instance), **deployment["env"]}
        instance["arguments"] = render_arguments(self._with_cpu_binding(deployment, instance), instance)
        if faults:
            self._find("warning", f"instance {name} is blocked: {instance['reason']}")
        return instance

    def _with_cpu_binding(self, deployment: dict, instance: dict) -> dict:
        """The deployment with vllm-ascend's own CPU binding switched off where it would work against ours.

        vllm-ascend binds by itself since 0.18.0, on ARM only (user guide, feature guide "CPU binding"; cpu_binding.py). On Atlas A3 it
        deals out the cpuset by the global NPU id over all NPUs, which is wrong within the cpuset of one instance; and cores of an
        instance's own are not to be dealt out again. On other chips it refines the cpuset of a node, and stays on.
        """
        ours = instance["cpus"] is not None and (self.dies > 1 or deployment["numa_binding"] == "cores")
        version = re.match(r"v?(\d+)\.(\d+)", deployment.get("vllm_version") or "")
        knows = version is None or (int(version[1]), int(version[2])) >= (0, 18)
        if not ours or not knows or self.cpu.get("architecture") != "aarch64" or self.facts.get("vendor") == "nvidia":
            return deployment
        key = next((key for key in deployment["args"] if key.replace("-", "_") == "additional_config"), "additional_config")
        additional = deployment["args"].get(key) or {}
        if not isinstance(additional, dict):
            return deployment
        if additional.get("enable_cpu_binding"):
            self._find("warning", f"{instance['name']}: additional_config.enable_cpu_binding and numa_binding: "
                       f"{deployment['numa_binding']} both bind its CPUs; set numa_binding: none, or take the key out", deployment)
        additional = {"enable_cpu_binding": False, **additional}
        return {**deployment, "args": {**deployment["args"], key: additional}}

    # -- what the operator should know

    def _check_ports(self, instances: list[dict]) -> None:
        owners: dict[int, str] = {}
        for instance in instances:
            other = owners.setdefault(instance["port"], instance["name"])
            if other != instance["name"]:
                self._find("error", f"port {instance['port']} is asked for by {other} and {instance['name']}; "
                           "give their deployments first_ports further apart")
            if instance["port"] > 65535:
                self._find("error", f"port {instance['port']} of {instance['name']} does not exist; lower first_port")
            for use, base in (("host", HCCL_HOST_PORT), ("device", HCCL_NPU_PORT)):
                end = base + HCCL_PORTS * (max(self.devices) + 1)
                if base <= instance["port"] < end:
                    self._find("error", f"port {instance['port']} of {instance['name']} is one of HCCL's {use} ports "
                               f"({base}-{end - 1}); choose another first_port")

    def _explain(self, instances: list[dict]) -> None:
        for instance in instances:
            deployment = next(one for one in self.deployments if one["name"] == instance["deployment"])
            devices = tuple(instance["devices"])
            known = {self.devices[device].node for device in devices} - {None}
            link = f" ({instance['link']})" if instance["link"] else ""
            home = f"NUMA node {_joined(sorted(known))}" if known else "NUMA node unknown"
            unbound = (" (numa_binding: none)" if deployment["numa_binding"] == "none" else " (no CPU there may be used)" if known else "")
            if instance["numa_nodes"] and known and set(instance["numa_nodes"]) != known:
                home += f", which has no memory: that of node {_joined(instance['numa_nodes'])}"
            cores = f"CPUs {instance['cpus']}" if instance["cpus"] else f"not bound{unbound}"
            why = ("kept" if instance["name"] in self.kept else
                   "assumed" if self.assumed else "placed anew" if instance["name"] in self.existing else "new")
            blocked = f", blocked: {instance['reason']}" if instance["reason"] else ""
            self.explain.append(f"{self.where}{instance['name']}: {_devices(devices)}{link}, {home}, {cores}, "
                                f"port {instance['port']}: {why}{blocked}")
        isolated = self.cpu.get("isolated")
        allowed = self.cpu.get("allowed")
        everything = {cpu for node in self.nodes.values() for cpu in parse_cpu_list(node["cpus"])}
        if isolated:
            self.explain.append(f"{self.where}CPUs {isolated} are isolated by the kernel and left alone")
        if allowed and not everything <= set(parse_cpu_list(allowed)):
            self.explain.append(f"{self.where}services are confined to CPUs {allowed}, and instances with them")
        idle = sorted(set(self.devices) - set(self.taken))
        if idle:
            self.explain.append(f"{self.where}{_devices(idle)}: without an instance")


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _devices(numbers: Sequence[int]) -> str:
    return f"device{'s' if len(numbers) > 1 else ''} {_joined(numbers)}"


def _ports(base: int, device: int) -> str:
    first = base + HCCL_PORTS * device
    return f"{first}-{first + HCCL_PORTS - 1}"


def _environment(deployment: dict, instance: dict) -> dict[str, str]:
    """What an Ascend engine needs to stay among its own devices and ports; a deployment's `env` overrides it."""
    env = {
        "ASCEND_RT_VISIBLE_DEVICES": instance["visible_devices"],
        # The engine's own 600 s are too short for big weights.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(deployment["start_timeout_s"]),
    }
    if len(instance["devices"]) > 1:
        env["HCCL_IF_BASE_PORT"] = instance["hccl_ports"]["host"].partition("-")[0]
        env["HCCL_NPU_SOCKET_PORT_RANGE"] = instance["hccl_ports"]["npu"]
    return env
