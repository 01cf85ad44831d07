"""The command `paceline`. Programs register their own subcommands through the entry-point group `paceline.commands`.

bench           `paceline bench`
demo            a linked server and agent as processes, for `paceline demo` in `client`, benches and tests
docs            `paceline docs`
doctor          `paceline doctor`
diagnosis       what `paceline doctor` looks at
main            root of the command: subcommands, exit codes
models          `paceline models`
options         shared options, and options made from a settings class
tables          `paceline tables`
"""
