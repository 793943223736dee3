"""What has to happen to a machine's instances, and in which order. Pure: wanted and observed in, plan out."""
from __future__ import annotations

import socket

from ansible_collections.llmops.ascend.plugins.module_utils.fingerprint import changes
from ansible_collections.llmops.ascend.plugins.module_utils.units import Instance

NONE, UPDATE, START, RESTART, REMOVE, BLOCKED = "none", "update", "start", "restart", "remove", "blocked"


def decide(wanted: dict, files: dict, state: str, reason: str, blocked_by: str | None, seen: Instance,
           recorded: bool, containers_known: bool = True) -> tuple[str, list]:
    """(action, reasons) for one wanted instance.

    `wanted` is its document, `files` the texts its files should have, `seen` what the machine has under its name.
    """
    if seen.foreign:
        return BLOCKED, [f"{seen.foreign} is not ours: adopt or retire it"]
    if state == "blocked":
        # Quarantine is the operator's word. A sick device is not: an instance that still answers goes on.
        if blocked_by == "quarantined" and (seen.document is not None or seen.running):
            return REMOVE, [reason]
        return BLOCKED, [reason]
    difference = changes(seen.document, wanted) if seen.document else []
    if seen.running:
        if seen.container.fingerprint != wanted["fingerprint"]:
            return RESTART, difference or ["what runs was started from an earlier specification"]
        if not seen.active:
            return START, [f"its container runs, its unit is {_state(seen)}"]
    elif not containers_known and seen.active:
        if seen.document is None or seen.document.get("fingerprint") != wanted["fingerprint"]:
            return RESTART, difference or ["its specification is missing"]
    else:
        why = "new" if seen.document is None else f"its unit is {_state(seen)}, its container does not run"
        return START, [why] + difference
    updates = [kind + " file differs" for kind in seen.differing(files)]
    if seen.unit.file_state != "enabled":
        updates.append("not enabled at boot")
    if not recorded:
        updates.append("not in the record")
    return (UPDATE, updates) if updates else (NONE, [])


def resources(document: dict | None) -> set:
    """What an instance holds that no other may hold: its devices and its port."""
    if not document:
        return set()
    return {("device", device) for device in document.get("devices") or []} | {("port", document.get("port"))}


def conflicts(actions: dict, wanted: dict, present: dict) -> dict:
    """{name: names of other instances that hold what it needs}, for all that start or restart.

    `actions` is {name: action}; `wanted` and `present` are documents by name.
    """
    found = {}
    for name, action in actions.items():
        if action in (START, RESTART):
            needs = resources(wanted[name])
            found[name] = {other for other, document in present.items()
                           if other != name and needs & resources(document)}
    return found


def order(actions: dict, wanted: dict, present: dict, max_unavailable: int = 1) -> list:
    """The steps that carry out the actions: [{kind, names, remove}].

    First what disturbs nothing (files, starts on free devices and ports, all at once), then restarts, `max_unavailable`
    at a time, then replacements (groups of instances of which one needs what another holds: all stopped before the
    first starts), at last removals.
    """
    links = conflicts(actions, wanted, present)
    groups = _groups(links)
    grouped = {name for group in groups for name in group}

    def single(action: str) -> list:
        return sorted(name for name, its in actions.items() if its == action and name not in grouped)

    steps = []
    if single(UPDATE):
        steps.append(_step("update", single(UPDATE)))
    if single(START):
        steps.append(_step("start", single(START)))
    restarts = single(RESTART)
    for first in range(0, len(restarts), max_unavailable):
        steps.append(_step("restart", restarts[first:first + max_unavailable]))
    for group in groups:
        steps.append(_step("replace", [name for name in group if actions[name] != REMOVE],
                           [name for name in group if actions[name] == REMOVE]))
    if single(REMOVE):
        steps.append(_step("remove", [], single(REMOVE)))
    return steps


def plan(wanted: dict, files: dict, placed: dict, seen: dict, recorded: set, max_unavailable: int,
         containers_unknown: str | None = None) -> tuple[list, list, list]:
    """(plan, steps, findings) for one machine.

    `wanted`: documents by name; `files`: their texts by name; `placed`: specifications by name (state, reason);
    `seen`: Instances by name, for wanted and owned names; `recorded`: names in the record.
    """
    machine, findings, actions, reasons = socket.gethostname(), [], {}, {}
    if containers_unknown:
        findings.append({"level": "warning", "check": "docker", "message":
                         f"{machine}: docker does not tell what runs ({containers_unknown}): comparing with files"})
    for name in sorted(seen):
        instance = seen[name]
        if name in wanted:
            actions[name], reasons[name] = decide(
                wanted[name], files[name], placed[name].get("state") or "placed", placed[name].get("reason") or "",
                placed[name].get("blocked_by"), instance, name in recorded, containers_unknown is None)
        elif not instance.foreign:
            actions[name], reasons[name] = REMOVE, ["not in the inventory any more"]
        if instance.foreign and name in wanted:
            findings.append({"level": "error", "check": "ownership", "message":
                             f"{machine}: {instance.foreign} is not ours, but instance {name} wants its name: "
                             "adopt or retire it, or rename the deployment"})
    present = {name: instance.document for name, instance in seen.items() if instance.document and not instance.foreign}
    changing = {name for name, action in actions.items() if action in (START, RESTART, REMOVE)}
    for name, holders in conflicts(actions, wanted, present).items():
        for holder in sorted(holders - changing):
            shared = sorted(resources(wanted[name]) & resources(present[holder]))
            actions[name] = BLOCKED
            reasons[name] = ["{} {} belongs to {}, which stays".format(*shared[0], holder)]
            findings.append({"level": "error", "check": "placement", "message":
                             f"{machine}: {name}: {reasons[name][0]}"})
            break
    entries = [{"name": name, "action": actions[name], "reasons": reasons[name], "active": seen[name].active}
               for name in sorted(actions)]
    return entries, order(actions, wanted, present, max_unavailable), findings


def _step(kind: str, names: list, remove: list | None = None) -> dict:
    return {"kind": kind, "names": names, "remove": remove or []}


def _groups(links: dict) -> list:
    """Connected components of more than one name, each sorted."""
    neighbours: dict = {}
    for name, others in links.items():
        for other in others:
            neighbours.setdefault(name, set()).add(other)
            neighbours.setdefault(other, set()).add(name)
    groups, visited = [], set()
    for name in sorted(neighbours):
        group, frontier = set(), {name} - visited
        while frontier:
            group |= frontier
            frontier = {other for member in frontier for other in neighbours[member]} - group
        if group:
            groups.append(sorted(group))
            visited |= group
    return groups


def _state(seen: Instance) -> str:
    return f"{seen.unit.active_state} ({seen.unit.sub_state})" if seen.unit.exists else "missing"
