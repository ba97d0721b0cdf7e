"""The command line: one thin Typer file a command, no logic. Heavy imports happen inside the commands."""
