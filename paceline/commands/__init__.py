"""The command `paceline`. Programs register their own subcommands through the entry-point group `paceline.commands`.

main       root of the command: subcommands, exit codes
options    shared options, and options made from a settings class; where programs add subcommands and checks
models     `paceline models`
docs       `paceline docs`, and `paceline policy`: documents that are asked for
tables     `paceline tables`
doctor     `paceline doctor`
diagnosis  what `paceline doctor` looks at
demo       a linked server and agent as processes, for `paceline demo` in `client`, benches and tests
"""
