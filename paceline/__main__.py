"""`python -m paceline`, the same as the command `paceline`."""

from __future__ import annotations

from paceline.commands.main import main

if __name__ == "__main__":
    main()
