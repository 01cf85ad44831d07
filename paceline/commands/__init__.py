"""The command `paceline`. Programs register their own subcommands through the entry-point group `paceline.commands`."""
