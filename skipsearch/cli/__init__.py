"""The command line: one thin Typer file a command, without logic of its own.

A command reads its options, calls the package and shows what comes back. Heavy imports happen
inside the commands, so that `--help` is quick. `main.py` turns every expected failure into one
sentence and an exit status; `common.py` has the two consoles: results go to stdout, everything else
to stderr."""
