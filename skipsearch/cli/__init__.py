"""The command line: one thin Typer file for each command, without logic of its own.

A command reads its options, calls the package and shows the result. Heavy imports happen inside the
commands, so that `--help` is quick.

    main           the entry point: registers commands, turns an error into a sentence and a status
    consoles       the two consoles: results go to stdout, everything else to stderr
    options        options that several commands share, and loading a model by them
    open_model     open what `--profile` and `--model` name
    terminal       shows text from outside with control characters escaped
    streams        repairs closed or non-Unicode standard streams
    progress       progress bars, and lines for a pipe

Options that several commands share are the fields of a dataclass, such as `LoadOptions`.
A command takes the dataclass as one parameter, and `unfold_options` makes each field an option.

Each other file is a command, or a group of commands: `bench_command` has `bench_run`, `bench_batch`
and `bench_methods`, which share `bench_options`, and the commands of `train` share `train_run`.
`tune_view`, `train_view` and `bench_view` print what a command shows, and `doctor_model` is the
part of `doctor` for one model.
"""
