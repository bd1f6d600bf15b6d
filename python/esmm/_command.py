"""The `esmm` command: runs the program that lies beside the library.

This file is also what pip puts on the PATH as `esmm`, so it uses the standard library alone and does not import the
package, which would load numpy and the library for nothing.
"""

import importlib.util
import os
import signal
import sys


def program() -> str:
    """The program's path: in the installed package, or in the source tree's build."""
    spec = importlib.util.find_spec("esmm")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        tree = os.path.dirname(os.path.dirname(package))
        for path in (os.path.join(package, "bin", "esmm"), os.path.join(tree, "build", "esmm")):
            if os.access(path, os.X_OK):
                return path
    sys.exit("esmm: the program is not there: install the package again, or run 'make' in its source tree")


def main() -> None:
    path = program()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would its children: `esmm ... | head`
    try:
        os.execv(path, ["esmm"] + sys.argv[1:])
    except OSError as e:
        sys.exit(f"esmm: {path} cannot be run: {e.strerror}")


if __name__ == "__main__":
    main()
