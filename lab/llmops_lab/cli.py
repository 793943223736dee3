"""The command line: `lab/lab --help`."""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from . import host, model, network, packages, rootfs, services
from . import machine as machines
from .cgroup import Group
from .settings import CACHE, DEFAULT_ENGINE_IMAGE, DEFAULT_MACHINES, Lab, LabError, Machine, parse_machines

DESCRIPTION = """\
Machines to try everything on: real Debian with systemd, sshd, apt and (once a role installed it) dockerd, each with a
management and a data network and eight simulated NPUs. Everything runs on this host, needs root, and is gone after `down`.

  lab/lab up                         boot machine66 to machine69, with an apt repository and an image registry
  lab/lab up --machines machine2-9   boot other ones, or more (several names: with commas)
  lab/lab status                     what runs where
  lab/lab ssh machine66              look around (user ops, sudo without password)
  lab/lab exec machine66 -- CMD      run a command as root, even when the network is cut
  lab/lab reset machine66            bare again, as if just delivered
  lab/lab down                       remove the lab; what took time to build stays in the cache

Break things: `reboot`, `kill` (power cut) and `start`, `cut` and `mend` (both network cables).
"""
EPILOG = f"""\
LAB=name lab/lab ...  means another lab beside the first, with networks of its own; `lab/lab env` prints what
inventories and tests need to know of it. LLMOPS_LAB_CACHE moves the cache (now {CACHE}).
Commands that take machines take several: machine66 machine68-69.
"""


def main() -> int:
    """Run the command line; the exit status is 0, 1 with one line on standard error, or that of the command that was run."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        lab = Lab.from_environment()
        if arguments.root:
            host.require_root()
        return arguments.run(lab, arguments) or 0
    except LabError as error:
        host.say(str(error))
    except KeyboardInterrupt:
        host.say("interrupted: the same command again carries on")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab/lab", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable, help: str, machine: str | None = None, root: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run, root=root)
        if machine:
            sub.add_argument("machine", metavar="MACHINE", nargs=machine, help="machine66, or several: machine66-69")
        return sub

    up = command("up", _up, "boot machines, and build and start everything they need; what is up stays up")
    up.add_argument("--machines", default=DEFAULT_MACHINES, metavar="LIST",
                    help="machine66,machine67 or machine66-69 (default: %(default)s)")
    up.add_argument("--fresh", action="store_true", help="bare, also where they are up or were used before")
    up.add_argument("--engine", default=DEFAULT_ENGINE_IMAGE, choices=["simulated", "vllm"],
                    help="the engine image for the registry; vllm is the real one, on CPU (default: %(default)s)")
    command("down", _down, "remove the lab with everything that runs, is mounted or is stored for it, also after a crash")
    status = command("status", _status, "show machines and services")
    status.add_argument("--json", action="store_true", help="for programs")
    ssh = command("ssh", _ssh, "log in as Ansible does, or run a command so", machine="?")
    ssh.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD")
    exec_ = command("exec", _exec, "run a command inside as root, without the network: exec MACHINE -- CMD", machine="?")
    exec_.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD")
    command("reset", _reset, "make machines bare again, as if just delivered", machine="+")
    command("reboot", _reboot, "reboot machines from inside and wait for them", machine="+")
    command("kill", _kill, "cut the power: processes are gone at once, disks stay", machine="+")
    command("start", _start, "switch machines on again and wait for them", machine="+")
    command("cut", _cut, "pull both network cables", machine="+")
    command("mend", _mend, "plug both network cables in", machine="+")
    command("env", _env, "print the lab's environment variables, for eval", root=False)
    command("build", _build, "build the root file system and the package repository, boot nothing")
    return parser


def _up(lab: Lab, arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    wanted = parse_machines(arguments.machines)
    host.require_tools()
    with host.lock(f"lab-{lab.name}"):
        rootfs.ensure()
        lab.state.mkdir(parents=True, exist_ok=True)
        if not lab.ssh_key.exists():
            machines.make_key(lab.ssh_key, f"lab {lab.name}")
        for machine in wanted:
            machines.wipe(lab, machine) if arguments.fresh else machines.prepare(lab, machine)
        highest = lab.machines()[-1]
        for name, source in services.models(arguments.engine).items():
            model.order(lab.directory(highest), name, source)
        _boot(lab, wanted)
        services.ensure(lab, arguments.engine)
        machines.wait_until_up(lab, wanted)
        if init := machines.init_pid(lab, highest):
            model.deliver(lab.directory(highest), Path(f"/proc/{init}/root"))
    host.say(f"{lab.name}: {', '.join(map(str, wanted))} up after {time.monotonic() - started:.1f} s")


def _down(lab: Lab, arguments: argparse.Namespace) -> None:
    with host.lock(f"lab-{lab.name}"):
        Group(lab.name).kill()
        with contextlib.suppress(OSError):  # another lab lives in it
            Group().path.rmdir()
        network.remove(lab)
        machines.remove_traces(lab)
        shutil.rmtree(lab.state, ignore_errors=True)
        if lab.state.exists():
            raise LabError(f"{lab.state} cannot be removed: see what holds it with `fuser -vm {lab.state}`")


def _status(lab: Lab, arguments: argparse.Namespace) -> None:
    cut = network.cut_machines(lab)
    running = services.status(lab)
    report = {
        "lab": lab.name,
        "management": lab.management,
        "data": lab.data,
        "state": str(lab.state),
        "apt": lab.apt_url,
        "registry": lab.registry,
        "artifacts": str(lab.artifacts),
        "services": running,
        "machines": [
            {
                "name": str(machine),
                "state": machines.state(lab, machine),
                "cut": str(machine) in cut,
                "management": f"{lab.management}.{machine.number}",
                "data": f"{lab.data}.{machine.number}",
                "init_pid": machines.init_pid(lab, machine),
            }
            for machine in lab.machines()
        ],
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for machine in report["machines"]:
        state = machine["state"] + (", network cut" if machine["cut"] else "")
        print(f"{machine['name']:<12}{state:<22}{machine['management']:<17}{machine['data']}")
    for name, answers in running.items():
        print(f"{name:<12}{'on' if answers else 'off':<22}{report[name]}")


def _ssh(lab: Lab, arguments: argparse.Namespace) -> None:
    machine, argv = _one(lab, arguments)
    command = machines.ssh(lab, machine, *argv)
    os.execvp(command[0], command)


def _exec(lab: Lab, arguments: argparse.Namespace) -> None:
    machine, argv = _one(lab, arguments)
    command = [*machines.enter(lab, machine), *(argv or ["bash"])]
    # What is run inside belongs to the machine: a power cut ends it too.
    Group(lab.name, str(machine), "system", "payload", "init.scope").enter()
    os.execvp(command[0], command)


def _one(lab: Lab, arguments: argparse.Namespace) -> tuple[Machine, list[str]]:
    if arguments.machine is None:
        raise LabError("which machine? For example: lab/lab ssh machine66")
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    return lab.existing(arguments.machine)[0], argv


def _several(lab: Lab, arguments: argparse.Namespace) -> list[Machine]:
    return lab.existing(",".join(arguments.machine))


def _reset(lab: Lab, arguments: argparse.Namespace) -> None:
    for machine in _several(lab, arguments):
        machines.wipe(lab, machine)
    _start(lab, arguments)


def _reboot(lab: Lab, arguments: argparse.Namespace) -> None:
    for machine in _several(lab, arguments):
        machines.reboot(lab, machine)
    machines.wait_until_up(lab, _several(lab, arguments))


def _kill(lab: Lab, arguments: argparse.Namespace) -> None:
    for machine in _several(lab, arguments):
        machines.kill(lab, machine)


def _start(lab: Lab, arguments: argparse.Namespace) -> None:
    chosen = _several(lab, arguments)
    _boot(lab, chosen)
    machines.wait_until_up(lab, chosen)


def _boot(lab: Lab, chosen: list[Machine]) -> None:
    for machine in network.broken(lab, chosen):
        machines.kill(lab, machine)
    network.ensure(lab, chosen)
    for machine in chosen:
        machines.start(lab, machine)


def _cut(lab: Lab, arguments: argparse.Namespace) -> None:
    for machine in _several(lab, arguments):
        network.cut(lab, machine)


def _mend(lab: Lab, arguments: argparse.Namespace) -> None:
    network.ensure(lab, _several(lab, arguments))


def _env(lab: Lab, arguments: argparse.Namespace) -> None:
    for name, value in lab.environment().items():
        print(f"export {name}={shlex.quote(value)}")


def _build(lab: Lab, arguments: argparse.Namespace) -> None:
    host.require_tools()
    for path in (rootfs.ensure(), packages.ensure(), services.registry_program(), model.ensure()):
        print(path)
