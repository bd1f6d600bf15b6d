"""The build backend that pip calls (PEP 517 and 660): make builds libesmm.so and the command, this file zips them.

A wheel is a zip file with three text files beside the package, and the package holds nothing that is compiled against
Python. So there is nothing for setuptools or scikit-build to do, and `pip install .` needs no build requirement (Python
below 3.11: a reader of pyproject.toml), and so no network for them.

    pip wheel . --config-settings=make="CUDA=0 JANSSON=0"     more variables for make
    pip wheel . --config-settings=build=/tmp/objects          where it builds; the default is the tree's build/
"""

import base64
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file in a wheel: the same sources give the same bytes


def get_requires_for_build_wheel(config_settings=None):
    return []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel


def project():
    """The [project] table, with the version that the header says."""
    try:
        import tomllib
    except ImportError:
        import tomli as tomllib
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
        table = tomllib.load(f)["project"]
    header = read("include/esmm.h")
    found = [re.search(r"#define ESMM_VERSION_%s (\d+)" % part, header) for part in ("MAJOR", "MINOR", "PATCH")]
    table["version"] = ".".join(match.group(1) for match in found)
    return table


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def metadata(table):
    lines = ["Metadata-Version: 2.1", "Name: " + table["name"], "Version: " + table["version"]]
    lines += ["Summary: " + table["description"], "License: " + table["license"]["text"]]
    lines += ["Requires-Python: " + table["requires-python"]]
    lines += ["Classifier: " + c for c in table["classifiers"]]
    lines += ["Requires-Dist: " + d for d in table["dependencies"]]
    for extra, wanted in table["optional-dependencies"].items():
        lines += ["Provides-Extra: " + extra] + ['Requires-Dist: %s ; extra == "%s"' % (d, extra) for d in wanted]
    lines += ["Description-Content-Type: text/markdown", "", read(table["readme"])]
    return "\n".join(lines)


def run_make(config_settings, target):
    """Builds; the directory that the target's files are in."""
    settings = config_settings or {}
    build = os.path.join(ROOT, settings.get("build") or os.environ.get("BUILD") or "build")
    more = settings.get("make") or []
    more = shlex.split(more) if isinstance(more, str) else [word for line in more for word in shlex.split(line)]
    make = os.environ.get("MAKE") or shutil.which("gmake") or shutil.which("make")
    if not make:
        raise SystemExit("esmm: GNU make is not installed, and it builds the library (apt-get install make gcc)")
    command = [make, "-C", ROOT, "--no-print-directory", "-j%d" % (os.cpu_count() or 1), "BUILD=" + build]
    # A make that called pip must not lend its own flags and job server.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(command + more + ["found", target], env=environment)
    if done.returncode:
        raise SystemExit("esmm: '%s' failed with status %d" % (" ".join(command + [target]), done.returncode))
    return build


class Wheel:
    """One wheel being written: RECORD lists each file with its hash, and comes last."""

    def __init__(self, directory, table, tag):
        base = "%s-%s" % (table["name"], table["version"])
        self.name = "%s-%s.whl" % (base, tag)
        self.info = base + ".dist-info"
        self.data = base + ".data"
        self.record = []
        self.zip = zipfile.ZipFile(os.path.join(directory, self.name), "w", zipfile.ZIP_DEFLATED, compresslevel=9)
        self.text(self.info + "/METADATA", metadata(table))
        self.text(self.info + "/LICENSE", read("LICENSE"))
        generator = "Wheel-Version: 1.0\nGenerator: esmm\nRoot-Is-Purelib: %s\nTag: %s\n"
        self.text(self.info + "/WHEEL", generator % (str(tag.endswith("any")).lower(), tag))

    def add(self, name, content, executable=False):
        entry = zipfile.ZipInfo(name, EPOCH)
        entry.external_attr = (0o100755 if executable else 0o100644) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        self.zip.writestr(entry, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self.record.append("%s,sha256=%s,%d" % (name, digest, len(content)))

    def text(self, name, content, executable=False):
        self.add(name, content.encode("utf-8"), executable)

    def file(self, name, path, executable=False):
        with open(path, "rb") as f:
            self.add(name, f.read(), executable)

    def command(self):
        """`esmm` on the PATH: pip writes its own python into the first line."""
        self.text(self.data + "/scripts/esmm", "#!python\n" + read("python/esmm/_command.py"), executable=True)

    def close(self):
        self.record.append(self.info + "/RECORD,,")
        entry = zipfile.ZipInfo(self.info + "/RECORD", EPOCH)
        entry.external_attr = 0o100644 << 16
        self.zip.writestr(entry, "\n".join(self.record) + "\n")
        self.zip.close()
        return self.name


def platform_tag():
    return "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build = run_make(config_settings, "python-files")
    wheel = Wheel(wheel_directory, project(), platform_tag())
    package = os.path.join(ROOT, "python", "esmm")
    for folder, subfolders, names in sorted(os.walk(package)):
        subfolders[:] = [s for s in subfolders if s != "__pycache__"]
        inside = os.path.relpath(folder, os.path.dirname(package)).replace(os.sep, "/")
        for name in sorted(names):
            if name.endswith((".py", ".typed", ".cpp", ".h")):
                wheel.file(inside + "/" + name, os.path.join(folder, name))
    for header in sorted(os.listdir(os.path.join(ROOT, "include"))):
        wheel.file("esmm/include/" + header, os.path.join(ROOT, "include", header))
    made = os.path.join(build, "python")
    for name in sorted(os.listdir(made)):
        wheel.file(("esmm/bin/" if name == "esmm" else "esmm/") + name, os.path.join(made, name), executable=True)
    wheel.command()
    return wheel.close()


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """`pip install -e .`: the package and its library are used where they lie."""
    run_make(config_settings, "all")
    wheel = Wheel(wheel_directory, project(), platform_tag())
    wheel.text("_esmm_editable.pth", os.path.join(ROOT, "python") + "\n")
    wheel.command()
    return wheel.close()


def build_sdist(sdist_directory, config_settings=None):
    table = project()
    base = "%s-%s" % (table["name"], table["version"])
    try:
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], stdout=subprocess.PIPE, check=True).stdout
        names = sorted(name for name in listed.decode().split("\0") if name)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("esmm: a source archive is made from a git checkout, and git does not see one in " + ROOT)
    with tarfile.open(os.path.join(sdist_directory, base + ".tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            if os.path.isfile(os.path.join(ROOT, name)):
                archive.add(os.path.join(ROOT, name), base + "/" + name, recursive=False)
        text = metadata(table).encode("utf-8")
        entry = tarfile.TarInfo(base + "/PKG-INFO")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return base + ".tar.gz"


if __name__ == "__main__":
    sys.exit("This file is called by pip: pip install . or pip wheel .")
