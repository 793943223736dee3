#!/usr/bin/env python3
"""Build the lab's simulated Ascend packages: driver and firmware as self-extracting .run files, and their checksums.

    lab/silicon/build.py DIRECTORY [--driver-version 26.0.rc1] [--firmware-version 7.8.0.6.201] [--machine x86_64]

Named as Huawei names the real ones. The same input gives the same bytes, so a directory already built is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHIP = "910b"
DRIVER_VERSION = "26.0.rc1"  # the cluster report's
FIRMWARE_VERSION = "7.8.0.6.201"
CHECKSUMS = "SHA256SUMS"

# Keys and values as in the version.info files of 25.3 and 24.1, with this package's version.
DRIVER_INFO = """\
Version={version}
ascendhal_version=7.35.23
aicpu_version=1.0
tdt_version=1.0
log_version=1.0
prof_version=2.0
dvppkernels_version=1.1
tsfw_version=1.0
Innerversion=V100R001C23SPC002B212
compatible_version=[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C22],[V100R001C23]
compatible_version_fw=[7.0.0,8.9.9]
package_version={version}
"""
FIRMWARE_INFO = """\
Version={version}
firmware_version=1.0
package_version={version}
compatible_version_drv=[24.0,24.0.],[24.1,24.1.],[25.0,25.0.],[25.2,25.2.],[25.3,25.3.],[25.5,25.5.],[26.0,26.0.]
"""


def build(
    directory: Path | str,
    driver_version: str = DRIVER_VERSION,
    firmware_version: str = FIRMWARE_VERSION,
    machine: str = platform.machine(),
) -> list[Path]:
    """Build both packages into a directory and list everything there in SHA256SUMS; returns the packages' paths."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arch = machine.replace("_", "-")
    packages = [
        write_package(
            directory / f"Ascend-hdk-{CHIP}-npu-driver_{driver_version}_linux-{arch}.run",
            {"product": "driver", "version": driver_version, "arch": machine},
            DRIVER_INFO,
        ),
        write_package(
            directory / f"Ascend-hdk-{CHIP}-npu-firmware_{firmware_version}.run",
            {"product": "firmware", "version": firmware_version, "arch": ""},
            FIRMWARE_INFO,
        ),
    ]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(directory.glob("*.run"))]
    (directory / CHECKSUMS).write_text("".join(sums))
    return packages


def write_package(path: Path, package: dict[str, str], version_info: str) -> Path:
    """One self-extracting package: the header script with its archive's checksum, then the archive."""
    files = {source.name: source.read_bytes() for source in (HERE / "package").iterdir() if source.is_file()}
    files["package.json"] = json.dumps(package).encode()
    files["version.info"] = version_info.format(version=package["version"]).encode()
    archive = tar(files)
    header = (HERE / "header.sh").read_text()
    header = (
        header.replace("@TITLE@", f"ASCEND {package['product'].upper()} RUN PACKAGE")
        .replace("@SHA256@", hashlib.sha256(archive).hexdigest())
        .replace("@LINES@", str(header.count("\n") + 1))
    )
    path.write_bytes(header.encode() + archive)
    path.chmod(0o755)
    return path


def tar(files: dict[str, bytes]) -> bytes:
    """An archive that depends on nothing but names and contents: no times, no owners, no compression."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--driver-version", default=DRIVER_VERSION)
    parser.add_argument("--firmware-version", default=FIRMWARE_VERSION)
    parser.add_argument("--machine", default=platform.machine(), help="as `uname -m` says it")
    for path in build(**vars(parser.parse_args())):
        print(path)


if __name__ == "__main__":
    main()
