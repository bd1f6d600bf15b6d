"""`python -m esmm ...` is the `esmm` command."""

from ._command import main

main()
