"""The command `paceline`. Programs register their own subcommands through the entry-point group `paceline.commands`.

bench           `paceline bench`
demo            `paceline demo`
demonstration   its pair of programs, and its questions
docs            `paceline docs`
doctor          `paceline doctor`
diagnosis       what `paceline doctor` looks at
main            root of the command: subcommands, exit codes
models          `paceline models`
options         shared options, and options made from a settings class
processes       child processes: start, wait, stop
tables          `paceline tables`
"""
