"""The switch phase between plan and load balancer: who serves at which moment, who has to roll, what stays unfinished.

Pure functions. An instance is what place_instances returns, a known instance what accelerator_facts says of those that
were there when the run began, a plan entry and a step what instance_plan returns.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

SETTLED = ("none", "update")
QUIET_STEPS = ("update", "start")


def needs_roll(steps: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a machine's steps touch something that serves, so that it has to wait for its turn."""
    return any(step["kind"] not in QUIET_STEPS for step in steps)


def plan_lines(plan: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]], check_mode: bool) -> list[str]:
    """What the switch does to each instance and why, a line each, and what has to stop together.

    Instances that the plan leaves alone are not mentioned.
    """
    verb = "would {}" if check_mode else "will {}"
    together = [
        f"{verb.format('stop')} {', '.join(sorted({*step['names'], *step['remove']}))} together before "
        f"{', '.join(step['names']) or 'nothing'} start: they pass on devices or ports"
        for step in steps
        if step["kind"] == "replace"
    ]
    return together + [
        f"{verb.format(entry['action']) if entry['action'] != 'blocked' else 'blocked:'} {entry['name']}: {'; '.join(entry['reasons'])}"
        for entry in plan
        if entry["action"] != "none"
    ]


def serving(
    instances: Iterable[Mapping[str, Any]],
    known: Iterable[Mapping[str, Any]],
    plan: Iterable[Mapping[str, Any]],
    done: Iterable[str] = (),
    gone: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The instances a machine offers at one moment of the switch, in the form of placed instances.

    Those the plan leaves alone and those in `done` (started or restarted by now) as they are placed; those whose change
    is still to come as they run now; those in `gone` and blocked ones not at all.
    """
    placed = {instance["name"]: dict(instance) for instance in instances}
    running = {instance["name"]: dict(instance) for instance in known if instance.get("running")}
    actions = {entry["name"]: entry["action"] for entry in plan}
    done, gone = set(done), set(gone)
    result = []
    for name in sorted(actions):
        if name in gone and name not in done:
            continue
        if actions[name] in SETTLED or name in done:
            result.append(placed[name])
        elif actions[name] in ("restart", "remove") and name in running:
            result.append(dict(running[name], state="placed"))
    return result


def backend_ids(step: Mapping[str, Any], known: Iterable[Mapping[str, Any]], machine: str) -> list[str]:
    """The backends a step takes away for a moment or for good, `MACHINE:PORT` as they are registered now."""
    concerned = {*step["names"], *step["remove"]}
    return [f"{machine}:{instance['port']}" for instance in known if instance["name"] in concerned and instance.get("service")]


def merged_rows(brief: Iterable[Mapping[str, Any]], full: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Verification rows with those of instances that were asked in full earlier in the run in place of the brief ones."""
    asked = {row["instance"]: row for row in full}
    return [row if row["unmet"] else asked.get(row["instance"], row) for row in brief]


def unfinished(machines: Iterable[str], variables: Mapping[str, Mapping[str, Any]], workers: Iterable[str]) -> list[str]:
    """One line for everything a run leaves undone: machines that dropped out, blocked instances, load balancers not reached.

    A quarantined device is the operator's word and no line.
    """
    lines, workers = [], set(workers)
    for machine in machines:
        facts = variables[machine]
        if machine in workers and not facts.get("switch_finished"):
            lines.append(f"{machine}: not converged: unreachable or failed, see above; the others were finished without it")
        for instance in (facts.get("placement") or {}).get("instances", ()):
            if instance["state"] == "blocked" and instance.get("blocked_by") != "quarantined":
                lines.append(
                    f"{machine}: {instance['name']} is blocked: {instance['reason']}; "
                    "mend it, or accept it with quarantined_devices, and run again"
                )
        lines += facts.get("load_balancer_failures") or []
    return lines
