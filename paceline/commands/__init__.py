"""The command `paceline`. Programs register their own subcommands through the entry-point group `paceline.commands`.

bench           `paceline bench`
demo            `paceline demo`
demo_questions  the demonstration's questions: asked, shown and judged
docs            `paceline docs`
doctor          `paceline doctor`
doctor_checks   the checks of `paceline doctor`, one function per subject
local_pair      a linked server and agent as two processes on this machine
main            root of the command: subcommands, exit codes
options         shared options, and options made from a settings class
processes       child processes: start, wait, stop
tables          `paceline tables`
"""
