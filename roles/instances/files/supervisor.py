#!/usr/bin/python3
# Managed by llmops.ascend: do not edit
"""Supervise one vLLM instance that runs in a docker container: the main process of its systemd unit (Type=notify).

    supervisor.py /etc/llmops/instances/NAME.json

The container is started detached and belongs to dockerd, not to this process. So this process may die and come back,
and so may dockerd (with live-restore), without the model being loaded again: a running container that wears the wanted
fingerprint is adopted. What systemd sees is the container: the unit is active when /health answers 200, its status line
is the stage of the load, its journal is the container's log, and it ends when the container does, with its exit code.

All waiting blocks on docker's API over its unix socket (https://docs.docker.com/reference/api/engine/): an instance
that serves costs no CPU here. The docker command itself is used to start the container only, because operators write
`container.options` in its syntax. Python 3.8 and its standard library are enough.
"""
from __future__ import annotations

import calendar
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

MANAGER = "llmops.ascend"
RUNTIME_DIRECTORY = Path("/run/llmops/instances")
RESTART_SECONDS = 15          # RestartSec= of the unit: what systemd itself waits before a restart
LONGEST_BACKOFF_SECONDS = 300
STABLE_SECONDS = 600          # an instance that served this long has no history of failures any more
STALL_SECONDS = 900           # a load that shows progress gets this much longer, each time it does
RETRY_SECONDS = 1.0

# What vLLM and vLLM-Ascend print while they load, and what that means to an operator.
STAGES = (
    (re.compile(r"Loading \S+ checkpoint shards:.*?(\d+)/(\d+)"), "loading weights, {0}/{1} shards"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"(?:Model loading|Loading model weights|Loading weights) took"), "weights loaded"),
    (re.compile(r"[Cc]apturing \w+ graphs?.*?(\d+)/(\d+)"), "capturing graphs, {0}/{1}"),
    (re.compile(r"[Cc]apturing \w+ graphs?|Graph capturing"), "capturing graphs"),
    (re.compile(r"torch\.compile|Compiling a graph|Dynamo bytecode"), "compiling"),
    (re.compile(r"KV cache size|Available KV cache memory|# \w+ blocks"), "KV cache allocated"),
    (re.compile(r"Starting vLLM API server|Application startup complete"), "API server starting"),
)


class Stopped(Exception):
    """systemd asked the unit to stop."""


class Refused(Exception):
    """The container cannot be started; the message is for the operator."""


class DockerAway(Exception):
    """dockerd does not answer: it is restarting, or not up yet."""


class DockerError(Exception):
    """dockerd answered with an error; the message is its own."""


def say(message: str) -> None:
    """One line of our own into the journal, told from the container's lines by its prefix."""
    os.write(1, f"[supervisor] {message}\n".encode())


def notify(*assignments: str) -> None:
    """Tell systemd (sd_notify(3)): "READY=1", "STATUS=...". Without systemd nobody is told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            channel.sendall("\n".join(assignments).encode())


def parse_number_list(text: str | None) -> set:
    """"0-2,8" -> {0, 1, 2, 8}: the format of sysfs and of docker's cpuset options."""
    numbers: set = set()
    for part in (text or "").strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def stage_of(line: str) -> str | None:
    """The stage of the load a log line tells of, or None."""
    for pattern, text in STAGES:
        found = pattern.search(line)
        if found:
            return text.format(*found.groups())
    return None


def backoff_seconds(failures: int) -> int:
    """How long to wait in all before the next start: 15, 30, 60, 120, 240, then 300 seconds."""
    return min(RESTART_SECONDS * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS) if failures else 0


def cpuset_options(spec: dict, cpus: set, nodes: set) -> tuple[list, list]:
    """docker's cpuset options where this machine's kernel has those CPUs and nodes, and a message for each left out.

    A cpuset the kernel does not know would make the start fail, and an unbound instance is better than none.
    """
    options, messages = [], []
    wanted_nodes = ",".join(map(str, spec["numa_nodes"] or []))
    for option, title, wanted, present in (("--cpuset-cpus", "CPUs", spec["cpus"], cpus),
                                           ("--cpuset-mems", "NUMA nodes", wanted_nodes, nodes)):
        if not wanted:
            continue
        if parse_number_list(wanted) <= present:
            options += [option, wanted]
        else:
            messages.append(f"not bound to {title} {wanted}: this machine does not have them all")
    return options, messages


def run_command(spec: dict, environment_file: Path, image: str, driver_volumes: list, cpuset: list) -> list:
    """The docker command that starts the instance. No secret is in it: they are in `environment_file`."""
    command = [
        "docker", "run", "--detach", "--name", spec["name"], "--init", "--network", "host", "--pull", "never",
        "--label", "llmops.managed-by=" + MANAGER,
        "--label", "llmops.instance=" + spec["name"],
        "--label", "llmops.fingerprint=" + spec["fingerprint"],
        "--label", "llmops.devices=" + ",".join(map(str, spec["devices"])),
        "--stop-timeout", str(spec["stop_timeout_s"]),
        # The journal has the log; docker's copy must be readable (another log driver might not be) and bounded.
        "--log-driver", "json-file", "--log-opt", "max-size=50m", "--log-opt", "max-file=2",
        "--shm-size", spec["shm_size"], "--env-file", str(environment_file),
    ]
    for node in spec["device_nodes"]:
        command += ["--device", node]
    for volume in driver_volumes + spec["volumes"]:
        command += ["--volume", volume]
    for key, value in sorted(spec["env"].items()):
        command += ["--env", f"{key}={value}"]
    return command + cpuset + spec["options"] + [image] + spec["arguments"]


class Docker:
    """The few calls of docker's API that are needed, over its unix socket, each on a connection of its own.

    Paths carry no API version, so that dockerd uses its own: 20.10 to 29 have no version in common.
    Every call raises DockerAway where dockerd does not answer and DockerError where it answers with an error.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("docker")
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(timeout)
        connection.sock.connect(self.path)
        return connection

    def _call(self, method: str, path: str, timeout: float | None = 60.0) -> tuple[int, dict]:
        try:
            connection = self._connect(timeout)
            try:
                connection.request(method, path)
                response = connection.getresponse()
                body = response.read()
            finally:
                connection.close()
            answer = json.loads(body) if body else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DockerAway(str(error)) from error
        if response.status >= 400 and response.status not in (404, 409):
            raise DockerError(answer.get("message", f"HTTP status {response.status}"))
        return response.status, answer

    def inspect(self, container: str) -> dict | None:
        """The container as dockerd describes it, or None."""
        status, answer = self._call("GET", f"/containers/{quote(container)}/json")
        return answer if status == 200 else None

    def image_id(self, image: str) -> str | None:
        """The id an image name stands for on this machine, or None."""
        status, answer = self._call("GET", f"/images/{quote(image)}/json")
        return answer.get("Id") if status == 200 else None

    def wait(self, container: str) -> None:
        """Block until the container does not run, or until dockerd shuts down."""
        self._call("POST", f"/containers/{container}/wait", timeout=None)

    def stop(self, container: str, seconds: int) -> None:
        """SIGTERM, `seconds` to finish, SIGKILL; returns when the container does not run any more."""
        self._call("POST", f"/containers/{container}/stop?t={seconds}", timeout=seconds + 60.0)

    def remove(self, container: str) -> None:
        """Remove the container with its anonymous volumes, and return when it is gone."""
        while self._call("DELETE", f"/containers/{container}?force=1&v=1")[0] == 409:
            time.sleep(0.2)                 # somebody else's removal is under way

    def logs(self, container: str, since: str, follow: bool):
        """Yield (timestamp, bytes) for each message of the container's log since a time.

        The stream is in frames of an 8-byte header (stream, three zeros, length) and one message, which begins with an
        RFC 3339 timestamp of fixed width and ends with a newline unless it is part of a longer one.
        """
        path = f"/containers/{container}/logs?stdout=1&stderr=1&timestamps=1&since={since}&follow={int(follow)}"
        try:
            connection = self._connect(None)
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                if response.status != 200:
                    raise DockerError("the log cannot be read: " + response.read().decode(errors="replace").strip())
                while True:
                    header = response.read(8)
                    if len(header) < 8:
                        return
                    stamp, _, message = response.read(int.from_bytes(header[4:], "big")).partition(b" ")
                    yield stamp.decode(), message
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise DockerAway(str(error)) from error


class LogFollower(threading.Thread):
    """Copies the container's log into the journal, each message once.

    How far it came is kept in a file under /run: a supervisor that takes over goes on there. Messages are told apart by
    timestamp and, should several share one, by their number within it.
    """

    def __init__(self, docker: Docker, container: str, position_file: Path, fresh: bool, on_line) -> None:
        super().__init__(name="log", daemon=True)
        self.docker, self.container, self.on_line = docker, container, on_line
        self.ended = threading.Event()
        self.stamp, self.count = self._recall(position_file)
        if not self.stamp and not fresh:    # adopted from an unknown predecessor: its log is old news
            self.stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + ".000000000Z"
        self.position = os.open(position_file, os.O_WRONLY | os.O_CREAT, 0o644)

    def _recall(self, path: Path) -> tuple[str, int]:
        try:
            container, stamp, count = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return "", 0
        return (stamp, int(count)) if container == self.container else ("", 0)

    def _since(self) -> str:
        """The position as docker's API wants it: Unix seconds with a fraction."""
        if not self.stamp:
            return "0"
        seconds = calendar.timegm(time.strptime(self.stamp[:19], "%Y-%m-%dT%H:%M:%S"))
        return "{}.{}".format(seconds, self.stamp[20:].rstrip("Z") or "0")

    def run(self) -> None:
        while not self.ended.is_set():
            self._copy(follow=True)
            self.ended.wait(RETRY_SECONDS)
        self._copy(follow=False)            # what came between the last message and the end

    def _copy(self, follow: bool) -> None:
        reached, repeated = self.stamp, self.count
        try:
            for stamp, message in self.docker.logs(self.container, self._since(), follow):
                if stamp < reached:
                    continue
                if stamp == reached and repeated:
                    repeated -= 1
                    continue
                self._emit(stamp, message)
        except DockerAway:
            pass                            # the waiter says so, and we try again
        except DockerError as error:
            say(str(error))

    def _emit(self, stamp: str, message: bytes) -> None:
        # A carriage return (progress bars) would make the journal treat the line as a blob.
        text = message.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        os.write(1, text)
        self.count = self.count + 1 if stamp == self.stamp else 1
        self.stamp = stamp
        os.pwrite(self.position, f"{self.container} {stamp} {self.count:<12}\n".encode(), 0)
        for line in text.decode(errors="replace").splitlines():
            self.on_line(line)

    def finish(self) -> None:
        """The container has ended: copy the rest, within reason."""
        self.ended.set()
        self.join(timeout=10)


class Supervisor:
    """One instance, from adopting or starting its container to its end."""

    def __init__(self, spec: dict, environment_file: Path, docker: Docker, runtime_directory: Path) -> None:
        self.spec, self.environment_file, self.docker = spec, environment_file, docker
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.failures_file = runtime_directory / (spec["name"] + ".failures")
        self.position_file = runtime_directory / (spec["name"] + ".log-position")
        self.ready_since: float | None = None
        self.stage = ""
        self.away = False

    def run(self) -> int:
        """Supervise until the container ends or systemd asks to stop. Returns the exit code."""
        try:
            self._wait_out_backoff()
            container, fresh = self._obtain()
        except Stopped:
            return self._stop()
        except (Refused, DockerError) as error:
            say(str(error))
            notify(f"STATUS={error}")
            self._remember_failure()
            return 1
        follower = LogFollower(self.docker, container, self.position_file, fresh, self._note_progress)
        follower.start()
        threading.Thread(target=self._watch, args=(container,), name="wait", daemon=True).start()
        try:
            code = self._serve()
        except Stopped:
            return self._stop(follower)
        follower.finish()
        say(f"the container ended with exit code {code}")
        self._remember_failure()
        return 1 if code is None else code

    def request_stop(self, *_signal) -> None:
        """Signal handler of SIGTERM."""
        self.events.put(("stop", None))

    # -- the container ------------------------------------------------------------------------------------------------

    def _obtain(self) -> tuple[str, bool]:
        """Adopt the running container or start one. Returns (container id, whether it is new)."""
        name = self.spec["name"]
        while True:
            try:
                found = self.docker.inspect(name)
                if found is None:
                    return self._start(), True
                labels = found["Config"].get("Labels") or {}
                if labels.get("llmops.managed-by") != MANAGER:
                    raise Refused(f"a container named {name} is not ours: adopt or retire it")
                if found["State"]["Running"]:
                    if labels.get("llmops.fingerprint") == self.spec["fingerprint"]:
                        say("adopted running container {}".format(found["Id"][:12]))
                        return found["Id"], False
                    say("stopping container {}, which runs an earlier specification".format(found["Id"][:12]))
                    self.docker.stop(found["Id"], self.spec["stop_timeout_s"])
                self.docker.remove(found["Id"])
            except DockerAway:
                self._note_docker(away=True)
                self._pause(RETRY_SECONDS)

    def _start(self) -> str:
        spec = self.spec
        for node in spec["device_nodes"]:
            if not Path(node.split(":")[0]).exists():
                raise Refused(f"device {node} is not there: is the driver loaded?")
        for volume in spec["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("/") and not Path(source).exists():
                raise Refused(f"{source} is not there, but is to be mounted into the container")
        driver_volumes = [volume for volume in spec["driver_volumes"] if Path(volume.split(":")[0]).exists()]
        cpuset, messages = cpuset_options(spec, *present_cpus_and_nodes())
        for message in messages:
            say(message)
        # The name reads better in `docker ps`, but only the id is certain to be what was asked for.
        image = spec["image"] if self.docker.image_id(spec["image"]) == spec["image_id"] else spec["image_id"]
        command = run_command(spec, self.environment_file, image, driver_volumes, cpuset)
        notify("STATUS=starting the container")
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        complaints = result.stderr.decode(errors="replace").strip()
        if result.returncode:
            if "Cannot connect to the Docker daemon" in complaints:
                raise DockerAway(complaints)
            raise Refused("docker run failed: " + complaints.replace("\n", " "))
        for line in complaints.splitlines():
            say(line)
        container = result.stdout.decode().split()[-1]
        say(f"started container {container[:12]} of {image}")
        return container

    def _watch(self, container: str) -> None:
        """Thread: report the container's end.

        dockerd's own restarts are waited out, and its word is checked: a dockerd that shuts down ends a wait, too.
        """
        while True:
            try:
                self.docker.wait(container)
                found = self.docker.inspect(container)
                self._note_docker(away=False)
                if found is None or not found["State"]["Running"]:
                    self.events.put(("ended", found["State"]["ExitCode"] if found else None))
                    return
            except (DockerAway, DockerError):
                self._note_docker(away=True)
                time.sleep(RETRY_SECONDS)

    # -- its life -----------------------------------------------------------------------------------------------------

    def _serve(self) -> int | None:
        """Wait for health, then for the end. Returns the container's exit code, None where it is gone."""
        if not self.stage:
            notify("STATUS=loading")
        while True:
            try:
                event, code = self.events.get(timeout=None if self.ready_since else RETRY_SECONDS)
            except queue.Empty:
                if healthy(self.spec["address"], self.spec["port"]):
                    self.ready_since = time.monotonic()
                    notify("READY=1", f"STATUS={self._serving()}")
                    say(self._serving())
                continue
            if event == "stop":
                raise Stopped
            return code

    def _serving(self) -> str:
        return "serving {} on {}:{}, devices {}".format(
            self.spec["model"], self.spec["address"], self.spec["port"], ",".join(map(str, self.spec["devices"])))

    def _note_progress(self, line: str) -> None:
        """Show the stage of the load and, as long as it moves on, ask systemd for more time.

        Only a new stage is progress: vLLM repeats "No available shared memory broadcast block" for ever when it hangs.
        """
        stage = None if self.ready_since else stage_of(line)
        if stage and stage != self.stage:
            self.stage = stage
            notify(f"STATUS={stage}", f"EXTEND_TIMEOUT_USEC={STALL_SECONDS * 1000000}")

    def _note_docker(self, away: bool) -> None:
        if away != self.away:
            say("dockerd does not answer; waiting for it" if away else "dockerd answers again")
        self.away = away

    def _stop(self, follower: LogFollower | None = None) -> int:
        """End the container gracefully and remove it. Patient with dockerd: systemd's TimeoutStopSec= is the limit."""
        seconds = self.spec["stop_timeout_s"]
        notify("STOPPING=1", f"STATUS=stopping, up to {seconds} s for running requests")
        while True:
            try:
                found = self.docker.inspect(self.spec["name"])
                if found and (found["Config"].get("Labels") or {}).get("llmops.managed-by") == MANAGER:
                    self.docker.stop(found["Id"], seconds)
                    if follower:
                        follower.finish()
                    self.docker.remove(found["Id"])
                break
            except DockerAway:
                self._note_docker(away=True)
                time.sleep(RETRY_SECONDS)
        forget(self.failures_file)
        forget(self.position_file)
        say("stopped")
        return 0

    # -- waiting longer after each failure ----------------------------------------------------------------------------
    # systemd's own RestartSteps= came with 254; the machines this runs on have older ones.

    def _wait_out_backoff(self) -> None:
        failures = recall_failures(self.failures_file)
        delay = backoff_seconds(failures) - RESTART_SECONDS
        if delay <= 0 or started_by_hand(self.spec["name"]):
            return
        text = f"waiting {delay} s more after {failures} failures in a row"
        say(text)
        notify("STATUS=" + text, "EXTEND_TIMEOUT_USEC={}".format((delay + self.spec["start_timeout_s"]) * 1000000))
        self._pause(delay)

    def _remember_failure(self) -> None:
        stable = self.ready_since is not None and time.monotonic() - self.ready_since >= STABLE_SECONDS
        failures = 1 if stable else recall_failures(self.failures_file) + 1
        self.failures_file.write_text(str(failures), encoding="ascii")

    def _pause(self, seconds: float) -> None:
        """Sleep, unless systemd asks to stop: then raise Stopped."""
        try:
            self.events.get(timeout=seconds)
        except queue.Empty:
            return
        raise Stopped


def healthy(address: str, port: int) -> bool:
    """Whether the engine answers /health with 200. vLLM opens its port only when the engine is up."""
    connection = http.client.HTTPConnection(address, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def present_cpus_and_nodes() -> tuple[set, set]:
    """The CPUs and memory nodes the kernel has for us: sysfs for CPUs, /proc for nodes it allows allocations on."""
    cpus = parse_number_list(Path("/sys/devices/system/cpu/online").read_text(encoding="ascii"))
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    nodes = re.search(r"^Mems_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    return cpus, parse_number_list(nodes.group(1)) if nodes else {0}


def started_by_hand(name: str) -> bool:
    """Whether this start was asked for (systemctl start, a boot) and is not one of systemd's own restarts."""
    result = subprocess.run(["systemctl", "show", "--property=NRestarts", "--value", name + ".service"],
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return result.stdout.strip() in (b"", b"0")


def recall_failures(path: Path) -> int:
    """How many starts in a row have failed."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def forget(path: Path) -> None:
    """Remove a file that may not be there."""
    with suppress(FileNotFoundError):
        path.unlink()


def main() -> int:
    """Supervise the instance whose specification is the first argument. Returns the exit code."""
    path = Path(sys.argv[1])
    spec = json.loads(path.read_text(encoding="utf-8"))
    docker_socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")[len("unix://"):]
    RUNTIME_DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    supervisor = Supervisor(spec, path.with_suffix(".env"), Docker(docker_socket), RUNTIME_DIRECTORY)
    signal.signal(signal.SIGTERM, supervisor.request_stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
