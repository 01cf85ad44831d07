"""One answer on one side: from a request to its strategy, prompts, machine, text and report."""
