"""Which machine a model comes from, and what stands in the way of it.

States are what the module model_manifest returns for a path, by machine and path: ``{"machine69": {"/data/models/X":
{"status": "whole", "id": "0f34...", "bytes": 29313468416, ...}}}``.
"""

from __future__ import annotations

from typing import Mapping, Sequence

# A model in one of these states can be given away; all but a whole one is read in full first, to make its manifest.
GIVABLE = ("whole", "unmanifested", "touched")
LACKING = ("absent", "damaged")

States = Mapping[str, Mapping[str, dict]]


def candidates(machine: str, path: str, model_source: str | None, states: States, hints: Sequence[str], workers: Sequence[str]) -> list[dict]:
    """Where the model at path may come from, in the order to ask: [{machine, path}].

    model_source, if given, is the only place: a machine, a directory of this machine, or machine:directory. Else come
    the machines of this run that have the model, then hints, then the workers outside this run. Machines that lack the
    same model start with different ones of those that have it. Raises ValueError for any other model_source.
    """
    if model_source:
        name, colon, directory = model_source.partition(":")
        if model_source.startswith("/"):
            return [{"machine": machine, "path": model_source}]
        if (name in workers and not colon) or directory.startswith("/"):
            return [{"machine": name, "path": directory or path}]
        raise ValueError(
            f"model_source {model_source!r} of {path} is neither a machine of the inventory, nor a directory (/...), nor machine:/directory"
        )
    holders = _holders(path, states)
    needing = sorted(name for name in states if states[name].get(path, {}).get("status") in LACKING)
    turn = needing.index(machine) % len(holders) if holders and machine in needing else 0
    others = [name for name in [*hints, *workers] if name not in states]
    return [{"machine": name, "path": path} for name in dict.fromkeys(holders[turn:] + holders[:turn] + others)]


def _holders(path: str, states: States) -> list[str]:
    """The machines that can give the model away; where their models differ, those that most of them have."""
    by_id: dict[str, list[str]] = {}
    for name in sorted(states):
        state = states[name].get(path, {})
        if state.get("status") in GIVABLE:
            by_id.setdefault(state.get("id") or "", []).append(name)
    return max(by_id.values(), key=len, default=[])


def givers(asked: Sequence[Mapping]) -> list[dict]:
    """Those of the machines asked that can give the model away: [{machine, path, rsync, and the model's state}].

    asked: [{machine, path, answer}], answer being what model_manifest returned there, or {} where nobody answered.
    """
    found = []
    for item in asked:
        state = item["answer"].get("models", {}).get(item["path"], {})
        if state.get("status") in GIVABLE:
            found.append({**state, "machine": item["machine"], "path": item["path"], "rsync": item["answer"]["rsync"]})
    return found


def not_found(machine: str, path: str, asked: Sequence[Mapping]) -> str:
    """The operator's line when none of the machines asked has the model (asked as in givers)."""
    places = []
    for item in asked:
        status = item["answer"].get("models", {}).get(item["path"], {}).get("status", "no answer")
        places.append(f"{item['machine']}:{item['path']} ({status})")
    return (
        f"{machine}: {path} is on no machine ({', '.join(places) or 'there is no other worker to ask'}): put the model "
        "there on one of them, or set model_source"
    )


def lacking(states: Mapping[str, dict]) -> list[str]:
    """The paths of one machine whose model has to be fetched, or mended."""
    return [path for path, state in states.items() if state["status"] in LACKING]


def obstacles(machine: str, states: Mapping[str, dict], edited_files: str) -> list[str]:
    """What has to be decided by a person before this machine's models can be used, one line each.

    edited_files says what to do with files that are no weights and differ from the manifest: fail, repair or accept.
    """
    lines = []
    for path, state in states.items():
        if state["status"] == "incomplete":
            lines.append(
                f"{machine}: {path} lacks {_some(state['missing'])}, which its index names, and has no manifest: "
                "complete it, or remove the directory so that it is copied"
            )
        elif state["status"] == "damaged" and state["edited"] and edited_files == "fail":
            lines.append(
                f"{machine}: {path}: {_some(state['edited'])} differs from the manifest: run with "
                "-e model_edited_files=accept if that is meant, with =repair to fetch it anew"
            )
    return lines


def differing(path: str, states: States) -> str | None:
    """The operator's line when machines have different models at the same path, else None."""
    by_id: dict[str, list[str]] = {}
    for name in sorted(states):
        found = states[name].get(path, {}).get("id")
        if found:
            by_id.setdefault(found, []).append(name)
    if len(by_id) < 2:
        return None
    groups = "; ".join(f"{', '.join(names)}: {digest[:12]}" for digest, names in sorted(by_id.items()))
    return f"{path} is not the same model everywhere ({groups}): remove it where it is wrong, and run again"


def model_ids(deployments: Mapping[str, dict], states: Mapping[str, dict]) -> dict[str, str | None]:
    """The manifest id of each deployment's model; None where it is not known yet (check mode)."""
    return {name: (states.get(item["model_path"]) or {}).get("id") for name, item in deployments.items()}


def image_facts(deployments: Mapping[str, dict], images: Mapping[str, dict]) -> dict[str, dict]:
    """What each container deployment's image is: {id, digest, architecture, vllm_version}, each None if not known yet."""
    keys = ("id", "digest", "architecture", "vllm_version")
    return {
        name: {key: (images.get(item["image"]) or {}).get(key) for key in keys}
        for name, item in deployments.items()
        if item["runtime"] == "container"
    }


def _some(names: Sequence[str], limit: int = 3) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
