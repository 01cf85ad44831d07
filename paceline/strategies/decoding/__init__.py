"""What the machines of all strategies share: sequences on the engine, and the tree of prefixes."""
