"""What every endpoint that writes text shares: request fields, choices, streaming."""
